from __future__ import annotations

from extproc.request import MediaSpan
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.pool_state import PrefixCacheStats
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.pool_fixture import PoolFixture


def test_learned_values_are_on_the_page():
    """Rates by endpoint, bytes per token by model, pauses of conversations by pool."""
    pool_fixture = PoolFixture({"10.0.0.1:8000": None}, profile="adaptive")
    for _ in range(8):
        pool_fixture.store.bytes_per_token.observe_usage("m", prompt_bytes=300, tokens=100)
    image = MediaSpan("image", 0, 400, 100, is_sized=True)
    for _ in range(4):
        pool_fixture.store.bytes_per_token.observe_usage(
            "m", prompt_bytes=0, tokens=200, media=[image]
        )
    view = build_view(
        pool_fixture.store.pool,
        PrefixCacheStats(5.0, 4.0, 100),
        bytes_per_token=pool_fixture.store.bytes_per_token.ratios,
        conversations=pool_fixture.director.conversation_stats,
        media_factors=pool_fixture.store.bytes_per_token.media.factors,
    )
    page = build_exposition(ProcessCounters(), {"": view}).render()
    spot = b'{endpoint="10.0.0.1:8000",pool=""}'
    for line in (
        b'extproc_continuation_ratio{pool=""} 0.5',
        b'extproc_idle_conversations_per_request{pool=""} 0.0',
        b'extproc_bytes_per_token{model="m",pool=""} 3.0',
        b'extproc_media_token_ratio{kind="image",model="m",pool=""} 2.0',
        b"extproc_endpoint_step_seconds" + spot + b" 0.015",
        b"extproc_endpoint_prefill_seconds_per_token" + spot + b" 0.0001",
        b"extproc_endpoint_decode_seconds_per_sequence" + spot + b" 0.0001",
        b"extproc_endpoint_context_seconds_per_token" + spot + b" 2e-07",
        b"extproc_endpoint_adapter_load_seconds" + spot + b" 0.5",
        b"extproc_endpoint_output_tokens" + spot + b" 200.0",
    ):
        assert line in page
