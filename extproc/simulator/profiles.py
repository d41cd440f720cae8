"""Hardware profiles: the service-time model of one engine and its limits.

One engine iteration takes `T = a + b*P + c*B + d*K` seconds: P prompt tokens computed in this
step (uncached only), B decoding sequences, K their total context tokens. The form and the L4
values are fitted to published runs; the other rows are arithmetic from data sheets with the same
efficiencies and are not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc import errors


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        name: What people call it.
        base_s: `a`: seconds every step takes, mostly reading the weights.
        prefill_s_per_token: `b`.
        decode_s_per_seq: `c`.
        context_s_per_token: `d`.
        kv_tokens: Tokens the KV cache holds; rounded down to whole blocks.
        block_tokens: Tokens per KV block; 16 is vLLM's default on CUDA.
        token_budget: Tokens per step (`max_num_batched_tokens`); at least `max_num_seqs`.
        max_num_seqs: Sequences in the batch.
        max_model_len: Prompt plus output tokens of one request.
        max_queued: Requests in the engine, waiting or running, before it refuses
            (`--max-num-queued-reqs`); 0 means no limit, as in vLLM.
        max_loras: Adapter slots on the device; 0 means LoRA is off.
        lora_load_s: Seconds a step grows by when it brings an adapter onto the device.
        lora_kv_tokens: KV tokens each resident adapter takes away.
        host_kv_tokens: Tokens of evicted blocks that the memory of the host holds; 0: none are copied
            there.
        reload_s_per_token: Seconds a step grows by for each token that is loaded from there.
    """

    name: str
    base_s: float
    prefill_s_per_token: float
    decode_s_per_seq: float
    context_s_per_token: float
    kv_tokens: int
    block_tokens: int = 16
    token_budget: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 32768
    max_queued: int = 0
    max_loras: int = 4
    lora_load_s: float = 0.0
    lora_kv_tokens: int = 0
    host_kv_tokens: int = 0
    reload_s_per_token: float = 0.0

    @property
    def blocks(self) -> int:
        """KV blocks of the engine."""
        return self.kv_tokens // self.block_tokens

    @property
    def host_blocks(self) -> int:
        """Blocks that the memory of the host holds."""
        return self.host_kv_tokens // self.block_tokens

    @property
    def lora_blocks(self) -> int:
        """KV blocks one resident adapter takes away."""
        return -(-self.lora_kv_tokens // self.block_tokens)

    @property
    def longest(self) -> int:
        """Prompt plus output tokens that always fit, whatever adapters are resident."""
        spare = self.blocks - self.max_loras * self.lora_blocks
        return min(self.max_model_len, spare * self.block_tokens)

    def faster(self, speed: float) -> EngineProfile:
        """The same machine with every time divided by `speed`."""
        return msgspec.structs.replace(
            self,
            base_s=self.base_s / speed,
            prefill_s_per_token=self.prefill_s_per_token / speed,
            decode_s_per_seq=self.decode_s_per_seq / speed,
            context_s_per_token=self.context_s_per_token / speed,
            lora_load_s=self.lora_load_s / speed,
            reload_s_per_token=self.reload_s_per_token / speed,
        )


def _row(
    name: str, *, times: tuple[float, float, float, float], kv_tokens: int, limits: tuple[int, int]
) -> EngineProfile:
    """A profile from a table row: a in ms, b in us, c in ms, d in us; (token budget, sequences)."""
    base_ms, prefill_us, decode_ms, context_us = times
    token_budget, max_num_seqs = limits
    return EngineProfile(
        name=name,
        base_s=base_ms / 1e3,
        prefill_s_per_token=prefill_us / 1e6,
        decode_s_per_seq=decode_ms / 1e3,
        context_s_per_token=context_us / 1e6,
        kv_tokens=kv_tokens,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
    )


#: For demonstrations on a laptop: a turn takes a fraction of a second, a missed prefix is felt
#: (150 us per token), and the KV cache holds about fifteen conversations of 1,500 tokens, so that
#: forty conversations fit four engines together but never one.
_DEMO = EngineProfile(
    name="demo",
    base_s=0.008,
    prefill_s_per_token=150e-6,
    decode_s_per_seq=0.2e-3,
    context_s_per_token=0.5e-6,
    kv_tokens=24_576,
    max_num_seqs=64,
    max_model_len=16_384,
    lora_load_s=0.050,
)

_A10 = _row("a10-7b-fp16", times=(28, 216, 0.10, 1.34), kv_tokens=11_008, limits=(2048, 256))

PROFILES: Mapping[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        _DEMO,
        _row("l4-8b-fp8", times=(33.6, 120, 0.164, 0.328), kv_tokens=102_000, limits=(16384, 256)),
        _row(
            "l4-8b-fp8-2k", times=(33.6, 120, 0.164, 0.328), kv_tokens=140_000, limits=(2048, 256)
        ),
        # Llama-2-7B without grouped heads: a LoRA slot costs KV here.
        msgspec.structs.replace(_A10, lora_kv_tokens=1_600, max_model_len=4_096),
        _row("a100-8b-bf16", times=(13.3, 94, 0.15, 0.13), kv_tokens=137_000, limits=(2048, 256)),
        _row("a100-7b-fp16", times=(14.0, 67.7, 0.10, 0.535), kv_tokens=44_960, limits=(2048, 256)),
        _row("h100-8b-bf16", times=(6.5, 32, 0.06, 0.065), kv_tokens=430_000, limits=(8192, 1024)),
        _row("2xh100-70b-fp8", times=(18, 79, 0.1, 0.08), kv_tokens=205_000, limits=(8192, 1024)),
        _row("4xh100-70b-bf16", times=(18, 73, 0.07, 0.04), kv_tokens=410_000, limits=(8192, 1024)),
    )
}


def find(name: str) -> EngineProfile:
    """The profile of that name.

    Raises:
        errors.ConfigError: There is none.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise errors.ConfigError(
            "--profile",
            wanted=f"one of {', '.join(sorted(PROFILES))}",
            got=repr(name),
            fix="name a listed profile",
        )
    return profile


#: Numbers of which an engine needs one at least; the others may be 0.
_AT_LEAST_ONE: Final = frozenset({"block_tokens", "max_num_seqs", "max_model_len"})

#: Seconds of a step at least; less is lost where it is added to the time of a long simulation.
_LEAST_STEP_S: Final = 1e-9

#: No number of an engine is greater; sums of such times and tokens are still exact enough.
_AT_MOST: Final = 10**9


def check(profile: EngineProfile) -> None:
    """Refuse numbers the engine cannot run with.

    Raises:
        errors.ConfigError: A number is too great or too small, the step budget is below the batch
            size, steps take no time, or nothing fits the cache.
    """
    for name in profile.__struct_fields__[1:]:
        value, least = getattr(profile, name), 1 if name in _AT_LEAST_ONE else 0
        if not least <= value <= _AT_MOST:
            raise errors.ConfigError(
                f"profile {profile.name}",
                wanted=f"{name} from {least} to {_AT_MOST}",
                got=str(value),
                fix=f"correct {name}, or leave it out",
            )
    if profile.token_budget < profile.max_num_seqs:
        raise errors.ConfigError(
            f"profile {profile.name}",
            wanted=f"token_budget of at least max_num_seqs ({profile.max_num_seqs})",
            got=str(profile.token_budget),
            fix="raise the budget: every running sequence decodes one token per step",
        )
    if profile.base_s < _LEAST_STEP_S:
        raise errors.ConfigError(
            f"profile {profile.name}",
            wanted=f"base_s of at least {_LEAST_STEP_S:g}",
            got=str(profile.base_s),
            fix="give every step some time: the simulation would not advance",
        )
    if profile.longest < 2 * profile.block_tokens:
        raise errors.ConfigError(
            f"profile {profile.name}",
            wanted=f"at least two KV blocks of {profile.block_tokens} tokens beside the adapters",
            got=f"room for {profile.longest} tokens",
            fix="raise kv_tokens, or lower max_loras or lora_kv_tokens",
        )
