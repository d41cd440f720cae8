"""KV events in a simulation: what engines store and remove reaches the picker at once.

Blocks of simulated prompts are keys without text, so the words of a block are its key, repeated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from extproc.endpoint import Endpoint
from extproc.pool.snapshot import EndpointSnapshot
from extproc.prefix_cache.cache_model import index_key
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from extproc.prefix_cache.token_blocks import EngineBlocks
from extproc.request import BYTES_PER_TOKEN
from extproc.simulator import kv
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec

#: Bytes of the words of a block, four for a token, of which a key takes eight.
_REPEATS = 4 * KEY_TOKENS // 8


class SimKvEvents:
    """Events of all engines to one picker.

    Args:
        exact: What engines publish, of the picker.
        nodes: All engines there will ever be.
    """

    def __init__(self, exact: ExactPrefixes, nodes: Sequence[EngineNode]) -> None:
        self._exact = exact
        self._nodes = nodes
        self._engines: dict[int, tuple[Endpoint, EngineBlocks]] = {}
        for n, node in enumerate(nodes):
            node.add_block_listener(partial(self._on_changes, n))

    def follow(self, n: int, endpoint: Endpoint) -> None:
        """Subscribe to an engine in a life of its endpoint.

        What it holds then is not known; it is exact from the beginning where it holds nothing.

        Args:
            n: Position of the engine.
            endpoint: The endpoint; the same incarnation changes nothing.
        """
        known = self._engines.get(n)
        if known is not None:
            if known[0].incarnation == endpoint.incarnation:
                return
            self._exact.forget(index_key(known[0]))
        index = self._exact.index
        engine = self._exact.open(index_key(endpoint), 0)
        index.set_live(engine, is_live=True)
        if not any(True for _ in self._nodes[n].engine.pool.keys):
            index.set_complete(engine)
        self._engines[n] = endpoint, engine

    def note_page(self, n: int, member: EndpointSnapshot) -> None:
        """Take in what the page of an engine shows of the time to reload blocks."""
        known = self._engines.get(n)
        weight = member.rates.reload_saving
        if known is not None and weight is not None:
            self._exact.index.set_lower_weight(known[1], 0, weight)

    def map_prompt(self, work: RequestSpec, chain: Sequence[int]) -> None:
        """Map the prompt of a request that was routed."""
        if chain and not self._exact.prompts.covers(chain):
            keys = work.keys[: work.prompt_tokens // KEY_TOKENS]
            words = array("I")
            words.frombytes(b"".join([_words(key) for key in keys]))
            prompt_bytes = work.prompt_tokens * BYTES_PER_TOKEN
            self._exact.map_prompt(chain, words, adapter="", prompt_bytes=prompt_bytes)

    def _on_changes(self, n: int, changes: Sequence[kv.BlockChange]) -> None:
        known = self._engines.get(n)
        if known is None:
            return
        index, engine = self._exact.index, known[1]
        for key, parent, is_stored, medium in changes:
            if key == kv.ALL_BLOCKS:
                index.apply(engine, AllBlocksCleared())
            elif not is_stored:
                index.apply(engine, BlockRemoved([key], medium))
            elif medium == kv.DEVICE:
                index.apply(engine, BlockStored([key], parent, _words(key), KEY_TOKENS))
            else:  # named by its hash alone, as vLLM does
                index.apply(engine, BlockStored([key], None, b"", KEY_TOKENS, medium=medium))
        index.sweep(256)


def _words(key: int) -> bytes:
    return key.to_bytes(8) * _REPEATS
