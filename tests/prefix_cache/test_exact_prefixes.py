"""Prompts by their tokens: what two prompts share is counted, and the oldest are given up."""

import gc
import tracemalloc
from array import array

from extproc.endpoint import Endpoint
from extproc.pool.inflight import InflightLoad
from extproc.prefix_cache import blocks, kv_events
from extproc.prefix_cache.exact_prefixes import ExactPrefixes, PromptMap
from extproc.prefix_cache.kv_events import BlockRemoved, BlockStored

#: Byte blocks of 64 bytes, token blocks of four tokens of four bytes: four in a byte block.
SCHEDULE = blocks.Schedule(block_bytes=64, growth=1, fine_bytes=4096)
SIZE = 4


def chain(prompt):
    return blocks.chain(prompt, b"", schedule=SCHEDULE)


def tokens(prompt):
    """One token for four bytes."""
    return array("I", prompt[: len(prompt) // 4 * 4])


def exact():
    """A pool with one engine that has stored a block, so that the size of blocks is known."""
    prefixes = ExactPrefixes(SCHEDULE, max_blocks=1000)
    engine = prefixes.open(("a", 0), 0)
    prefixes.index.set_live(engine, is_live=True)
    prefixes.index.apply(engine, BlockStored([1], None, tokens(b"x" * 16).tobytes(), SIZE))
    return prefixes, engine


def add(prefixes, prompt):
    prefixes.map_prompt(chain(prompt), tokens(prompt), adapter="", prompt_bytes=len(prompt))


def sent(address):
    """A request that was sent to an address."""
    return InflightLoad(Endpoint(address)).open("", 100, cached_tokens=0, now=0.0)


def text(*letters):
    return b"".join(letter * 8 for letter in letters)


SYSTEM = b"".join(b"%08d" % number for number in range(20))  # 160 bytes: ten blocks of tokens


def test_the_same_prompt_and_its_next_turn_are_found_to_the_last_block():
    """Of the same prompt the last token is computed again; a longer one shares all of it."""
    prefixes, _ = exact()
    prompt = SYSTEM + text(*[b"%d" % digit for digit in range(4)])
    assert len(prompt) == 192
    add(prefixes, prompt)
    assert prefixes.prompts.find(chain(prompt))[2] == 11
    assert prefixes.prompts.find(chain(prompt + b"y" * 200))[2] == 12
    assert prefixes.prompts.find(chain(b"z" + prompt)) is None
    assert prefixes.prompts.find(()) is None


def test_blocks_that_prompts_share_are_counted_where_they_part():
    """The first prompt estimates, the second one knows: 160 bytes are ten blocks of tokens."""
    prefixes, _ = exact()
    first, second = SYSTEM + b"a" * 300, SYSTEM + b"b" * 300
    add(prefixes, first)
    assert prefixes.prompts.find(chain(second))[2] == 8
    add(prefixes, second)
    assert prefixes.prompts.find(chain(SYSTEM + b"c" * 300))[2] == 10


def test_a_prompt_that_renders_otherwise_is_cut_where_it_differs():
    """The next turn of a conversation may drop what an engine generated before."""
    prefixes, _ = exact()
    prompt = SYSTEM + b"a" * 96
    add(prefixes, prompt)
    longer = prompt + b"b" * 64
    other = tokens(SYSTEM) + tokens(b"q" * 160)
    prefixes.map_prompt(chain(longer), other, adapter="", prompt_bytes=len(longer))
    assert prefixes.prompts.find(chain(prompt + b"c" * 64))[2] == 10


def test_a_prompt_has_no_more_blocks_than_tokens_fill():
    """Digits are a token each: the estimate for the text before them was too high."""
    prefixes, engine = exact()
    system = tokens(SYSTEM)
    prefixes.index.apply(engine, BlockStored(range(10, 20), None, system.tobytes(), SIZE))
    first, second = SYSTEM + b"1" * 600, SYSTEM + b"b" * 32
    digits = system + array("I", range(600))
    prefixes.map_prompt(chain(first), digits, adapter="", prompt_bytes=len(first))
    assert prefixes.prompts.find(chain(SYSTEM[:64]))[2] == 13
    add(prefixes, second)
    prefixes.index.apply(engine, BlockStored([30], 19, tokens(b"b" * 16).tobytes(), SIZE))
    prefixes.index.apply(engine, BlockStored([31, 32], 30, tokens(b"b" * 32).tobytes(), SIZE))
    match = prefixes.match(chain(SYSTEM[:64] + b"c" * 256))
    assert match.depth == 1
    assert match.ends == [(12, engine.bit)]


def test_events_of_any_engine_make_prompts_worth_mapping():
    """One whose events arrive is enough."""
    prefixes, engine = exact()
    prefixes.open(("b", 0), 0)
    assert prefixes.is_any_live
    prefixes.index.set_live(engine, is_live=False)
    assert not prefixes.is_any_live


def test_prompts_are_given_up_where_blocks_get_another_size():
    """Keys of their blocks are others then."""
    prefixes, engine = exact()
    add(prefixes, SYSTEM)
    prefixes.index.wipe(engine, is_complete=True)
    while prefixes.index.sweep(10):
        pass
    prefixes.index.apply(engine, BlockStored([1], None, tokens(b"x" * 32).tobytes(), 2 * SIZE))
    assert prefixes.index.block_tokens == 2 * SIZE
    assert prefixes.match(chain(SYSTEM)) is None
    assert not len(prefixes.prompts)
    add(prefixes, SYSTEM)
    assert prefixes.prompts.find(chain(SYSTEM + b"y" * 200))[2] == 5


def test_a_prompt_of_too_many_blocks_is_not_mapped():
    """Engines choose how many tokens a block has, and how many a prompt."""
    prefixes, _ = exact()
    for count in (131_073, 131_072):
        assert not prefixes.prompts.covers(chain(SYSTEM))
        many = array("I", [1]) * (count * SIZE)
        is_mapped = prefixes.map_prompt(chain(SYSTEM), many, adapter="", prompt_bytes=160)
        assert is_mapped == (count == 131_072)
    assert prefixes.prompts.covers(chain(SYSTEM))


def test_oldest_prompts_are_given_up_with_what_only_they_have():
    """Blocks that a later prompt shares stay."""
    prompts = PromptMap(SCHEDULE.cuts, max_blocks=50 + 2 * 32)
    for letter in b"abcdefgh":
        prompt = SYSTEM + bytes([letter]) * 160
        keys = kv_events.block_keys(1, tokens(prompt).tobytes(), SIZE)
        prompts.add(chain(prompt), keys, tokens=80, block_tokens=SIZE, prompt_bytes=len(prompt))
    assert len(prompts) == 2
    assert prompts.find(chain(SYSTEM + b"a" * 160))[2] == 10
    assert prompts.covers(chain(SYSTEM + b"h" * 160))
    assert not prompts.covers(chain(SYSTEM + b"a" * 160))
    prompts.add(chain(SYSTEM), [1] * 120, tokens=480, block_tokens=SIZE, prompt_bytes=160)
    assert len(prompts) == 2


def test_prompts_without_a_full_block_are_given_up_too():
    """Of engines with long blocks, and of one that answers with a single token for every prompt."""
    prompts = PromptMap(SCHEDULE.cuts, max_blocks=850)
    for number in range(100):
        prompt = b"%08d" % number * 20
        prompts.add(chain(prompt), [], tokens=1, block_tokens=SIZE, prompt_bytes=len(prompt))
        prompts.add(chain(prompt), [], tokens=1, block_tokens=SIZE, prompt_bytes=len(prompt))
    assert len(prompts) == 850 // (32 + len(chain(prompt))) == 25
    assert prompts.covers(chain(prompt))
    assert len(prompts._at) == 50


def test_match_says_what_each_engine_holds():
    """Depths are in blocks of tokens; unmapped prompts have none."""
    prefixes, engine = exact()
    other = prefixes.open(("b", 0), 0)
    prompt = SYSTEM + b"a" * 96
    assert prefixes.match(chain(prompt)) is None
    add(prefixes, prompt)
    packed = tokens(prompt).tobytes()
    prefixes.index.apply(engine, BlockStored([2, 3], None, packed[: 2 * 16], SIZE))
    prefixes.index.apply(other, BlockStored([7], None, packed[:16], SIZE))
    match = prefixes.match(chain(prompt))
    mapped, depths = match.prompt, match.ends
    assert match.depth == len(chain(prompt))
    assert depths == [(1, other.bit), (2, engine.bit)]
    assert prefixes.tokens_by_slot(depths) == [8, 4]
    prefixes.record_sent(chain(prompt), sent("a"), 3.0)
    assert [(address, prompt.at) for address, prompt in mapped.sent.items()] == [("a", 3.0)]
    prefixes.forget(("b", 0))
    prefixes.index.sweep(100)
    assert prefixes.tokens_by_slot(prefixes.match(chain(prompt)).ends) == [8, 0]
    assert prefixes.engines(("b", 0)) == ()


def test_images_keep_prompts_of_equal_tokens_apart():
    """Placeholders are equal tokens; an engine holds what it stored with the same identifier."""
    prefixes, engine = exact()
    placeholder = tokens(SYSTEM + b"i" * 96)
    packed = placeholder.tobytes()
    extras = [b""] * 10 + kv_events.block_extras([(0, 16, "cat")], SIZE, 6)
    hashes = list(range(10, 26))
    for name in ("cat", "dog"):
        prefixes.map_prompt(
            chain(SYSTEM + name.encode() * 32),
            placeholder,
            adapter="",
            prompt_bytes=256,
            placeholders=[(40, 16, name)],
        )
    assert prefixes.match(chain(SYSTEM + b"cat" * 32)) is None
    prefixes.index.apply(engine, BlockStored(hashes, None, packed, SIZE, extras=extras))
    assert prefixes.match(chain(SYSTEM + b"cat" * 32)).ends == [(15, engine.bit)]
    # Whether engines call the other image so as well is not known while none of them holds it.
    assert prefixes.match(chain(SYSTEM + b"dog" * 32)) is None
    assert prefixes.match(chain(SYSTEM)).ends == [(10, engine.bit)]


def test_salts_keep_prompts_of_equal_tokens_apart():
    """An engine that names no salts is not taken to hold the prompt, nor to lack it."""
    prefixes, engine = exact()
    text = tokens(SYSTEM)
    prefixes.map_prompt(chain(b"salt" + SYSTEM), text, adapter="", prompt_bytes=164, salt="s")
    stored = BlockStored(list(range(10, 20)), None, text.tobytes(), SIZE)
    prefixes.index.apply(engine, stored)
    assert prefixes.match(chain(b"salt" + SYSTEM)) is None
    extras = kv_events.block_extras((), SIZE, 10, salt="s")
    salted = BlockStored(list(range(30, 40)), None, text.tobytes(), SIZE, extras=extras)
    prefixes.index.apply(engine, salted)
    assert prefixes.match(chain(b"salt" + SYSTEM)).ends == [
        (9, engine.bit)
    ]  # one token is computed


def test_adapters_keep_prompts_of_equal_tokens_apart():
    """An engine that names no adapters is not taken to hold the prompt, nor to lack it."""
    prefixes, engine = exact()
    text, prompt = tokens(SYSTEM), chain(b"sql!" + SYSTEM)
    prefixes.map_prompt(prompt, text, adapter="sql", prompt_bytes=164)
    for first, adapter in ((10, ""), (30, "#1")):
        hashes = list(range(first, first + 10))
        prefixes.index.apply(
            engine, BlockStored(hashes, None, text.tobytes(), SIZE, adapter=adapter)
        )
        assert prefixes.match(prompt) is None
    stored = BlockStored(list(range(50, 60)), None, text.tobytes(), SIZE, adapter="sql")
    prefixes.index.apply(engine, stored)
    assert prefixes.match(prompt).ends == [(9, engine.bit)]  # one token is computed


def test_the_next_turn_finds_the_answer_that_engines_stored():
    """The blocks behind the earlier prompt count, where an engine holds them."""
    prefixes, engine = exact()
    prompt = SYSTEM + b"a" * 96
    add(prefixes, prompt)
    packed = tokens(prompt).tobytes()
    prefixes.index.apply(engine, BlockStored(list(range(10, 26)), None, packed, SIZE))
    for number in range(3):
        answer = tokens(b"%016d" % number).tobytes()
        prefixes.index.apply(
            engine,
            BlockStored([30 + number], 25 + 5 * (number > 0) + max(0, number - 1), answer, SIZE),
        )
    assert prefixes.match(chain(prompt)).ends == [(15, engine.bit)]
    longer = chain(prompt + b"b" * 128)
    assert prefixes.match(longer).ends == [(19, engine.bit)]
    assert prefixes.match(longer).ends == [(19, engine.bit)]
    prefixes.index.apply(engine, BlockRemoved([32]))
    assert prefixes.match(longer).ends == [(18, engine.bit)]


def test_a_prompt_remembers_few_engines():
    """Prompts that go everywhere do not grow, and of those that are never mapped few are kept."""
    prefixes, _ = exact()
    add(prefixes, SYSTEM)
    for number in range(100):
        prefixes.record_sent(chain(SYSTEM), sent(f"e{number}"), float(number))
    assert len(prefixes.match(chain(SYSTEM)).prompt.sent) == 16
    for number in range(1100):
        prefixes.record_sent(chain(b"%08d" % number * 8), sent("a"), 1.0)
    for number, addresses in ((0, []), (1099, ["a"])):
        prompt = b"%08d" % number * 8
        add(prefixes, prompt)
        assert list(prefixes.match(chain(prompt)).prompt.sent) == addresses


def test_short_prompts_are_few():
    """Short prompts take memory, and time when they are evicted, and clients choose their length."""
    prompts = PromptMap(SCHEDULE.cuts, max_blocks=3300)
    for number in range(200):
        prompts.add([number], [number], tokens=5, block_tokens=SIZE, prompt_bytes=64)
    assert len(prompts) == 100


def measure_bytes(act):
    """Memory that is taken afterwards and was not before."""
    gc.collect()
    tracemalloc.start()
    act()
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def test_a_prompt_that_is_never_mapped_takes_little_memory():
    """Such as one that no engine renders, which goes to every engine in time."""
    prefixes, _ = exact()

    def send():
        for number in range(1000):
            prefixes.record_sent(chain(SYSTEM), sent(f"10.0.0.{number}:8000"), float(number))

    assert measure_bytes(send) < 10_000


def test_mapped_prompts_take_little_memory():
    """At most 60 bytes for a block that they count as, also where many engines had all of them."""
    prefixes, _ = exact()
    accounts = [InflightLoad(Endpoint(f"10.0.0.{number}:8000")) for number in range(16)]

    def send():
        for number in range(500):
            prompt = b"%016d" % number * 16
            for account in accounts:
                request = account.open("", 64, cached_tokens=0, now=0.0, blocks=chain(prompt))
                prefixes.record_sent(request.blocks, request, 0.0)
                request.close(1.0)
            add(prefixes, prompt)

    size = measure_bytes(send)
    assert len(prefixes.prompts) == 500
    assert size < 60 * 500 * (32 + 16)


def test_a_prompt_remembers_where_those_that_it_goes_on_from_were_sent():
    """Their blocks are there, or on their way; what is sent later is its own."""
    prefixes, _ = exact()
    longer = SYSTEM + b"a" * 96
    prefixes.record_sent(chain(longer), sent("b"), 2.0)
    add(prefixes, SYSTEM)
    prefixes.record_sent(chain(SYSTEM), sent("a"), 1.0)
    add(prefixes, longer)
    assert list(prefixes.match(chain(longer)).prompt.sent) == ["a", "b"]
    add(prefixes, SYSTEM + b"b" * 96)
    assert list(prefixes.match(chain(longer)).prompt.sent) == ["a", "b"]


def test_a_sent_prompt_arrives_until_its_request_ends():
    """However long it waits on the engine; and not where another endpoint answers in its place."""
    prefixes, _ = exact()
    add(prefixes, SYSTEM)
    request = sent("a")
    prefixes.record_sent(chain(SYSTEM), request, 1.0)
    arriving = prefixes.match(chain(SYSTEM)).prompt.sent["a"].is_arriving
    assert arriving("a", 100.0)
    other = InflightLoad(Endpoint("b"))
    request.move(other, 100.0, cached_tokens=0)
    assert not arriving("a", 100.0)
    request.close(100.0)
    assert not arriving("a", 100.0)
    assert arriving("a", 2.0)
