"""Body, state and configuration of a decision that is explained, and what is written about it."""

import json

from extproc.cli import main
from tests.support.canary import CANARY

BODY = json.dumps({"model": "sql", "messages": [{"role": "user", "content": CANARY * 100}]})

STATE = """
endpoints:
  - {address: "10.0.0.1:8000", waiting: 3, running: 12, kv_usage: 0.4, in_flight: 5,
     adapters: [sql], adapter_slots: 4, matched_tokens: 256, age_s: 0.5}
  - {address: "10.0.0.2:8000", waiting: 0, running: 2, kv_usage: 0.1, adapters: [],
     adapter_slots: 4}
  - {address: "10.0.0.3:8000", in_flight: 1}
"""

CONFIG = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  fallbacks: 1
  profile:
    name: strict
    filters: [{kind: max-waiting, params: {max_waiting_requests: 2}}]
    scorers: [{kind: queue-depth, weight: 2}, {kind: in-flight, weight: 1}]
"""


def told_by(capsys, *words, status=0):
    assert main.main(["explain", *words]) == status
    output = capsys.readouterr().out
    assert CANARY not in output
    return output
