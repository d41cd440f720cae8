"""Published figures; docs/spec/prior-systems.md says how they were measured."""

from __future__ import annotations

#: KubeAI's chat-py on 8 L4: (most open, strategy) to requests per second, TTFT mean in ms,
#: TPOT mean in ms, ITL median and p99 in ms.
L4 = {
    (800, "round-robin"): (50.01, 1319.77, 189.29, 94.60, 715.66),
    (800, "least-load"): (50.51, 817.18, 191.44, 124.55, 691.97),
    (800, "prefix-hash"): (76.43, 280.20, 86.55, 77.35, 272.04),
    (1600, "round-robin"): (50.93, 10365.29, 216.53, 90.35, 749.96),
    (1600, "least-load"): (52.28, 10579.01, 212.39, 92.65, 747.65),
    (1600, "prefix-hash"): (72.73, 196.13, 78.51, 70.36, 249.71),
    (3200, "round-robin"): (51.16, 27183.41, 214.63, 88.07, 742.53),
    (3200, "least-load"): (52.48, 24147.86, 211.98, 93.29, 721.71),
    (3200, "prefix-hash"): (71.84, 213.92, 78.73, 70.32, 242.44),
    (8000, "round-robin"): (51.22, 48587.55, 215.24, 87.08, 751.68),
    (8000, "least-load"): (52.43, 39163.80, 214.09, 90.36, 725.95),
    (8000, "prefix-hash"): (74.15, 237.06, 79.99, 71.31, 303.14),
}

#: The early gateway's LoRA experiment: column to requests per minute, TTFT mean and p95 in s, and
#: seconds per token with the first one's wait (llmperf's inter-token latency), means of the runs.
LORA = {
    "lora-base": {
        "baseline": (80.09, 2.99, 17.07, 0.15),
        "maximum": (89.76, 0.584, 1.196, 0.056),
        "least-queue": (80.54, 1.26, 5.21, 0.085),
        "least-kv-cache": (89.71, 0.78, 1.235, 0.065),
        "queue-kv": (93.21, 0.80, 1.90, 0.06),
    },
    "lora-10": {
        "baseline": (52.42, 12.58, 52.26, 0.395),
        "maximum": (59.94, 4.94, 27.14, 0.15),
        "least-queue": (49.49, 12.49, 43.62, 0.38),
        "least-kv-cache": (39.41, 14.85, 131.0, 0.265),
        "queue-kv": (39.14, 11.18, 62.17, 0.34),
        "lora-queue": (40.84, 5.94, 27.39, 0.15),
        "lora-kv": (39.88, 10.99, 50.76, 0.36),
    },
    "lora-4": {
        "baseline": (96.34, 3.01, 18.36, 0.12),
        "maximum": (95.77, 1.48, 8.64, 0.11),
        "least-queue": (107.34, 0.96, 16.39, 0.08),
        "least-kv-cache": (109.50, 0.49, 0.63, 0.05),
        "queue-kv": (112.34, 0.35, 0.57, 0.05),
        "lora-queue": (99.27, 2.33, 13.38, 0.13),
        "lora-kv": (107.55, 1.65, 9.64, 0.09),
    },
}

#: KubeAI's k6 runs: (scenario, strategy) to requests per second and HTTP mean, median, p90, p95 in s.
K6 = {
    ("k6-s1", "least-load"): (12.42, 6.31, 6.66, 8.55, 9.07),
    ("k6-s1", "prefix-hash"): (19.23, 4.08, 2.45, 9.63, 10.26),
    ("k6-s2", "least-load"): (76.27, 3.54, 3.53, 5.95, 6.53),
    ("k6-s2", "prefix-hash"): (85.02, 3.13, 2.22, 6.67, 7.33),
}

#: Wallaroo's load profiles: scenario to seconds of all responses, mean, median and p95; 1.3 there.
#: Profile A's mean has at least fifteen errors of 0.4 s in it.
WALLAROO = {
    "wallaroo-a": (186.77, 242.85, 300.41),
    "wallaroo-b": (240.34, 253.78, 300.42),
    "wallaroo-c": (95.12, 94.44, 213.08),
}
