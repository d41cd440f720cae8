"""The numbers in the README, made from `bench/results`.

    python -m bench.readme          # rewrites the block in README.md

A test holds the block against the results, so that neither can be changed alone.
"""

from __future__ import annotations

from bench import agreement, capacity, replicas, rig, run, scaling
from bench.real_vllm import report

BEGIN, END = "<!-- results -->\n", "\n<!-- /results -->"
REAL_BEGIN, REAL_END = "<!-- real vllm -->\n", "\n<!-- /real vllm -->"
AGREEMENT_BEGIN, AGREEMENT_END = "<!-- agreement -->\n", "\n<!-- /agreement -->"
SCALING_BEGIN, SCALING_END = "<!-- scaling -->\n", "\n<!-- /scaling -->"
CAPACITY_BEGIN, CAPACITY_END = "<!-- capacity -->\n", "\n<!-- /capacity -->"
SHARING_BEGIN, SHARING_END = "<!-- sharing -->\n", "\n<!-- /sharing -->"
REPLICAS_BEGIN, REPLICAS_END = "<!-- replicas -->\n", "\n<!-- /replicas -->"


def block() -> str:
    """One row per bar that has a result."""
    rows = ["| bar | wanted | measured | | command |", "|---|---|---|---|---|"]
    notes = []
    for number, name, wanted, figure, met in run.BARS:
        if not (rig.RESULTS / f"{name}.json").exists():
            continue
        result = run.read(name)
        verdict = "met" if met(result) else "**missed**"
        rows.append(
            f"| {number} | {wanted} | {figure(result)} | {verdict} | `{result['command']}` |"
        )
        machine = result["machine"]
        notes.append(
            f"{result['date']}, {machine['cores']} cores of {machine['cpu']}, "
            f"{machine['memory_gib']} GiB, Python {machine['python']}"
        )
    where = "; ".join(sorted(set(notes)))
    said = [f"Measured {where}." if where else "Nothing measured yet.", *_floor()]
    return "\n".join([*rows, "", " ".join(said)])


def _floor() -> list[str]:
    """What the gRPC runtime alone costs, beside what was measured."""
    if not (rig.RESULTS / "overhead.json").exists():
        return []
    result = run.read("overhead")
    return [
        f"In {name}, extproc takes {one['extproc_cpu_us']} us of CPU per request and the constant "
        f"floor {one['floor_cpu_us']} us, {one['floor_alike_cpu_us']} us with gRPC run as extproc "
        f"runs it; at one connection the floor alone adds {one['floor_added_p50_ms']} ms; at half "
        f"of saturation the p99 is {one['half_saturation']['p99_ms']} ms."
        for name, one in (("FDS", result["fds"]), ("buffered", result["buffered"]))
    ]


def real_block() -> str:
    """Real engines beside simulated ones."""
    return report.block(run.read("real_vllm"))


def agreement_block() -> str:
    """Real runs beside what the simulator says of them."""
    if not (rig.RESULTS / "agreement.json").exists():
        return "Nothing measured yet."
    return agreement.block(run.read("agreement"))


def sharing_block() -> str:
    """Several pickers behind a real Envoy, by themselves and talking."""
    return replicas.real_block(run.read("replicas"))


def replicas_block() -> str:
    """Several pickers beside one."""
    if not (rig.RESULTS / "replicas.json").exists():
        return "Nothing measured yet."
    return replicas.block(run.read("replicas"))


def capacity_block() -> str:
    """Tenants and priorities while requests wait."""
    if not (rig.RESULTS / "capacity.json").exists():
        return "Nothing measured yet."
    return capacity.block(run.read("capacity"))


def scaling_block() -> str:
    """Autoscaling policies beside each other."""
    if not (rig.RESULTS / "scaling.json").exists():
        return "Nothing measured yet."
    return scaling.block(run.read("scaling"))


def main() -> None:
    path = rig.ROOT / "README.md"
    text = path.read_text()
    for begin, made, end in (
        (BEGIN, block(), END),
        (REAL_BEGIN, real_block(), REAL_END),
        (AGREEMENT_BEGIN, agreement_block(), AGREEMENT_END),
        (REPLICAS_BEGIN, replicas_block(), REPLICAS_END),
        (SHARING_BEGIN, sharing_block(), SHARING_END),
        (CAPACITY_BEGIN, capacity_block(), CAPACITY_END),
        (SCALING_BEGIN, scaling_block(), SCALING_END),
    ):
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = head + begin + made + end + tail
    path.write_text(text)


if __name__ == "__main__":
    main()
