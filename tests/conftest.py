"""Workers of `make test`, the files that they begin with, and the number of random examples."""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import signal
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadFileScheduling

from tests.support.canary import CanaryHandler
from tests.support.child_process import live, pytest_pyfunc_call
from tests.support.programs import MissingProgram

__all__ = ["live", "pytest_pyfunc_call"]

HERE = Path(__file__).parent

#: Workers for each core: tests of whole installations wait for half of their time, the others do
#: not, and each worker imports and collects all tests.
PER_CORE = 1.5

#: More would not make it faster: the longest file is what is waited for.
MOST = 8

#: What takes longest, first, so that no worker is left alone with one of them at the end; files that
#: compute stand between files that wait.
LONG = (
    "monitoring/test_faults.py",
    "e2e/test_demo.py",
    "kubernetes/test_scaling.py",
    "kubernetes/test_discovery.py",
    "bench/test_published.py",
    "bench/test_scaling.py",
    "e2e/test_rollout.py",
    "e2e/test_xds.py",
    "e2e/test_demo_scale.py",
    "e2e/test_scaling_restart.py",
    "e2e/test_lifecycle.py",
    "e2e/test_failing.py",
    "prefix_cache/test_index.py",
    "e2e/test_many.py",
    "scheduling/test_contract.py",
    "e2e/test_client_headers.py",
    "server/test_growth.py",
    "e2e/test_local_replies.py",
    "e2e/test_wheel.py",
    "manifests/test_overlays.py",
    "e2e/test_bodies.py",
    "manifests/test_chart.py",
    "e2e/test_rewrites.py",
    "simulator/test_simulate_command.py",
    "e2e/test_models.py",
    "docs/test_site.py",
    "e2e/test_flow_control.py",
    "e2e/test_conformance.py",
    "http2/test_against_grpcio.py",
    "e2e/test_agreement.py",
)

# Examples are derived from the test's own name and code, so that a run on one machine says the same as
# on another; `--hypothesis-profile=thorough`, which CI gives, tries more of them. `make fuzz` searches
# with `search`, from another seed each time. None judges how long an example takes: workers share
# cores, and a slow moment is no flaw.
for name, count, repeats in (("quick", 10, True), ("thorough", 100, True), ("search", 1000, False)):
    hypothesis.settings.register_profile(
        name,
        max_examples=count,
        derandomize=repeats,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("quick")

# No test trusts public authorities, and a tenth of the time a process takes to start is reading them.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)

# A script's background jobs, and all they start, ignore Ctrl-C; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are collected: nearly all that comes into being meanwhile stays.
gc.disable()

#: Reads all that tests log; the root logger has it, so that libraries are read too.
CANARIES = CanaryHandler()
logging.getLogger().addHandler(CANARIES)
logging.getLogger("extproc").setLevel(logging.INFO)


def is_from_this_loop(record):
    """True if a record comes from the running test.

    grpcio keeps the event loops of ended tests, and calls them when another test's call completes.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (
        "PollerCompletionQueue" in record.getMessage() and str(error) == "Event loop is closed"
    )


logging.getLogger("asyncio").addFilter(is_from_this_loop)

RANKS = {HERE / name: rank for rank, name in enumerate(LONG)}
assert all(path.is_file() for path in RANKS), "a file of LONG is gone"


def pytest_addoption(parser):
    """Of `make fuzz`."""
    parser.addoption(
        "--fuzz-minutes",
        type=float,
        default=None,
        help="start no further test after so many minutes, and none that does not try examples",
    )


def pytest_configure(config):
    """When fuzzing began, and which examples are tried."""
    if config.getoption("--hypothesis-profile") is None:
        # Hypothesis mixes constants of all modules that are loaded into its examples. To read them
        # takes each worker seconds, and which are loaded differs from run to run.
        providers._get_local_constants = lambda: providers._local_constants
    config.fuzz_end = None
    if (minutes := config.getoption("--fuzz-minutes")) is not None:
        config.fuzz_end = time.monotonic() + 60.0 * minutes


def pytest_runtest_setup(item):
    """Fuzzing is bounded in time."""
    end = item.config.fuzz_end
    if end is not None and time.monotonic() > end:
        pytest.skip("the time for fuzzing is over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """No test logs what stands for a prompt or a secret."""
    CANARIES.take_leaks()
    result = yield
    assert not CANARIES.take_leaks(), item.nodeid
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a missing program as of the folder of tests that needs it."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(MissingProgram):
        folder = HERE / item.path.relative_to(HERE).parts[0]
        report.longrepr = (str(folder), 0, str(call.excinfo.value))
    return report


@pytest.fixture(scope="module", autouse=True)
def collected():
    """Objects that warn when they are collected do so in their own file, not in another one's test."""
    yield
    gc.collect()
    # What is left is modules and tables, which later files need not look through.
    gc.freeze()


def pytest_xdist_auto_num_workers(config):
    """Of `-n auto`."""
    linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return min(math.ceil(PER_CORE * cores), MOST)


class Scheduling(LoadFileScheduling):
    """Files stay on a worker, and all files that need an API server on the same one.

    Each worker that runs some of them starts an API server of its own.
    """

    def _split_scope(self, nodeid):
        path = super()._split_scope(nodeid)
        return "tests/kubernetes" if path.startswith("tests/kubernetes/") else path


def pytest_xdist_make_scheduler(config, log):
    """Of `--dist loadfile`."""
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # after hypothesis marked what tries examples
def pytest_collection_modifyitems(items):
    """Long files first, and the others as they were found; for fuzzing, files in any order.

    Every worker must come to the same order, so that is drawn from what names their run.
    """
    if items and items[0].config.fuzz_end is not None:
        chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", "alone"))
        drawn: dict[Path, float] = {}
        items[:] = [item for item in items if item.get_closest_marker("hypothesis")]
        items.sort(key=lambda item: drawn.setdefault(item.path, chance.random()))
        return
    items.sort(key=lambda item: RANKS.get(item.path, len(RANKS)))


def pytest_collection_finish(session):
    """Collected objects are exempt from garbage collection, which would traverse them repeatedly."""
    gc.enable()
    gc.collect()
    gc.freeze()
