"""The native core as Python sees it (native/binding.cpp). Buffers are little-endian; lengths are not checked here."""

from typing import TypeAlias

from typing_extensions import Buffer

def xxh64(data: bytes, seed: int = 0) -> int: ...
def prefix_hashes(
    seed: int, block_size: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None
) -> bytes: ...

class SlotMap:
    """Contexts, slots and owners of a snapshot -> those of the index that reads it."""

    def import_owner(self, saved: int, owner: int) -> None: ...

class PrefixIndex:
    def __init__(
        self,
        ttl_ticks: int,
        contexts_max: int,
        prefixes_per_context_max: int,
        prefixes_max: int,
        orphan_blocks_max: int,
        speculative_blocks_max: int,
        claims_max: int,
        lists_all: bool,
        contents: FuzzyIndex | None = None,
    ) -> None: ...
    def add_context(self, seed: int, block_size: int) -> tuple[int, int | None]: ...
    def touch_context(self, context: int) -> None: ...
    def context_size(self, context: int) -> int: ...
    def add_source(self) -> int: ...
    def has_source(self, source: int) -> bool: ...
    def drop_source(self, source: int) -> None: ...
    def store(
        self,
        source: int,
        context: int,
        tier: int,
        group: int,
        engine_hashes: bytes,
        parent: int | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        now: int,
        count_copies: bool,
        owner: int,
    ) -> tuple[int, int, int]: ...
    def place(
        self,
        source: int,
        tier: int,
        group: int,
        engine_hashes: bytes,
        now: int,
        count_copies: bool,
        owner: int,
    ) -> tuple[int, int, int]: ...
    def add_owner(self) -> int: ...
    def clear_owner(self, owner: int) -> None: ...
    def owner_claims(self) -> list[tuple[int, int]]: ...
    def unclaimed_owners(self) -> list[int]: ...
    def list_all(self, visits_max: int, now: int) -> bool: ...
    def holdings(self, context: int, prefix_hashes: bytes, now: int) -> bytes:
        """Rows of uint32 place, source, owner."""

    def owners_at(
        self, context: int, source: int, tier: int, group: int, prefix_hashes: bytes
    ) -> list[tuple[int, int]]: ...
    def store_prefixes(
        self,
        source: int,
        context: int,
        tier: int,
        group: int,
        engine_hashes: bytes,
        prefix_hashes: bytes,
        copies: bytes,
        now: int,
        count_copies: bool,
        owner: int,
    ) -> tuple[int, int, int]: ...
    def store_hashed(
        self,
        source: int,
        context: int,
        tier: int,
        group: int,
        engine_hashes: bytes,
        chain_from: int | None,
        prefix_hashes: bytes,
        contents: bytes,
        now: int,
        count_copies: bool,
        owner: int,
    ) -> tuple[int, int, int]: ...
    def chain_of(
        self, source: int, context: int, tier: int, group: int, parent: int, now: int
    ) -> int | None: ...
    def remove(
        self, source: int, tier: int, group: int, engine_hashes: bytes, now: int
    ) -> tuple[int, int]: ...
    def clear(self, source: int, tier: int | None, context: int | None) -> None: ...
    def match_tokens(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> bytes:
        """Rows of six uint32: source, depths of tiers 0..3 (cumulative), depth with speculative marks."""

    def match_hashes(self, context: int, prefix_hashes: bytes, now: int) -> bytes: ...
    def add_speculative(
        self, context: int, source: int, prefix_hashes: bytes, ttl_ticks: int, now: int
    ) -> int: ...
    def holders(self, context: int, prefix_hash: int, now: int) -> list[tuple[int, int, int]]: ...
    def prefix_of(
        self, context: int, source: int, tier: int, group: int, engine_hash: int, now: int
    ) -> int | None: ...
    def names(
        self, at: int, in_others: bool, names_max: int, now: int
    ) -> tuple[list[tuple[int, int, int, int, bytes, bytes, bytes]], bool, int, bool]:
        """Runs of (source, context, tier, group, engine hashes, prefix hashes, copies); done; where to go on."""

    def blocks_by_tier(self, source: int) -> tuple[int, int, int, int]: ...
    def slots(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """(context, slot, source, tier, group, blocks, digest) of every living slot."""

    def export_begin(self) -> None: ...
    def export_names(self, names_max: int) -> tuple[bytes, bool]:
        """A frame; whether the walk is at its end."""

    def export_changes(self, keys_max: int) -> tuple[bytes, int]:
        """A frame; how many keys that changed are left."""

    def export_contents(self, rows_max: int) -> tuple[bytes, bool]: ...
    def export_claims(self, claims_max: int) -> tuple[bytes, bool]: ...
    def has_whole_contents(self) -> bool: ...
    def export_end(self) -> None: ...
    def import_slot(
        self,
        slots: SlotMap,
        old_context: int,
        old_slot: int,
        context: int,
        source: int,
        tier: int,
        group: int,
    ) -> None: ...
    def import_expect(self, context: int, entries: int) -> int: ...
    def import_expect_names(self, entries: int, other_names: int) -> None:
        """What is about to come, before anything is held: roughly."""

    def import_settle(self, rows_max: int) -> bool:
        """True with the last slice."""

    def import_frame(
        self,
        frame: bytes,
        slots: SlotMap,
        saved_at: int,
        elapsed: int,
        now: int,
        takes_contents: bool,
    ) -> bool: ...
    def orphan_blocks(self, source: int) -> int: ...
    def orphan_drops(self) -> list[tuple[int, int]]: ...
    def sweep(self, now: int, visits_max: int) -> tuple[int, int, bool]: ...
    def statistics(
        self,
    ) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]: ...

# -- what is under way to the log (native/flight_book.hpp)

def hash_blocks(
    chain_from: int, block_size: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, shingle: int
) -> tuple[bytes, bytes]:
    """Prefix hashes; (SimHash, content hash) of the leading blocks without extra keys, none for shingle 0."""

class FlightBook:
    """What one source's engine hashes will mean. `number` ascends from event to event."""

    def __init__(self) -> None: ...
    def is_empty(self) -> bool: ...
    def blocks(self) -> int: ...
    def meaning(self, seed: int, tier: int, group: int, engine_hash: int) -> tuple[int, int]:
        """0: nothing under way concerns it; 1: this prefix; 2: nobody knows yet."""

    def store(
        self,
        number: int,
        seed: int,
        tier: int,
        group: int,
        engine_hashes: bytes,
        prefix_hashes: bytes,
    ) -> None: ...
    def touch(self, number: int, engine_hashes: bytes) -> None: ...
    def clear(self, number: int) -> None: ...
    def land(self, number: int) -> None: ...

class AnswerBook:
    """What an answer says of each source beside its depths (native/answer_book.hpp)."""

    def __init__(self) -> None: ...
    def put(
        self,
        source: int,
        pod: str,
        opening: bytes,
        dp_rank: int,
        block_size: int,
        state: str,
        heard_at_s: float,
    ) -> None:
        """`opening` is the row's JSON up to its first figure; `block_size` 0 and `heard_at_s` NaN are none."""

    def hear(self, source: int, heard_at_s: float) -> bool:
        """What changes with every batch; False for a source that is not in the book."""

    def drop(self, source: int) -> None: ...
    def render(
        self,
        head: bytes,
        tail: bytes,
        answers: list[tuple[int, bytes]],
        unit: int,
        tokens: int,
        now_s: float,
        sources: set[int] | None,
    ) -> tuple[bytes, int, int]:
        """`head`, the rows best first, `tail`; and how deep the best row is, in blocks and in tokens.

        `answers` are (block size, packed rows) of each context, `sources` those that may be shown.
        """

    def match(
        self,
        index: PrefixIndex,
        context: int,
        asked: bytes,
        are_hashes: bool,
        extra_keys: tuple[bytes, ...] | None,
        now: int,
        head: bytes,
        tail: bytes,
        unit: int,
        tokens: int,
        now_s: float,
        sources: set[int] | None,
    ) -> tuple[bytes, int, int]:
        """The same for a query of one context, whose block size is `unit`; `asked` are its token ids or hashes."""

# -- fuzzy (native/fuzzy_index.hpp)

def simhash(token_ids: bytes, shingle: int = 1) -> int:
    """Of all the tokens, as one block; at least `shingle` of them."""

def content_hashes(token_ids: bytes, block_size: int, shingle: int = 1) -> bytes:
    """SimHash and content hash of every full block, uint64, alternating."""

def sliding_simhashes(token_ids: bytes, block_size: int, shingle: int = 1) -> bytes:
    """uint64, one for the block at every token offset."""

def linear_scan(stored: bytes, queries: bytes, distance_max: int) -> bytes:
    """For benchmarks: rows of uint32 query, uint32 stored for all pairs of SimHashes within the distance."""

class IdTable:
    """For tests: keys that no blocks are known for. A key's number is its place among all that were inserted."""

    def __init__(self) -> None: ...
    def reserve(self, entries: int) -> None: ...
    def insert(self, keys: bytes) -> None: ...
    def erase(self, numbers: bytes) -> None:
        """As uint32; all of them are there."""

    def numbers(self, keys: bytes) -> bytes:
        """As uint32, of all entries with one of these keys."""

    def all(self) -> bytes:
        """As uint32, in the order of their places."""

    def bytes(self) -> int: ...

class NarrowIdTable(IdTable):
    """The same, growing as on a machine without wide registers."""

class LooseIdTable(IdTable):
    """As loose as the table of names is."""

class LooseNarrowIdTable(IdTable):
    """Both."""

class NearTable:
    """For tests: SimHashes that no tokens are known for, in a table of 2**bits buckets, 6 <= bits <= 20."""

    def __init__(self, bits: int, scans: int = 0) -> None: ...
    def insert(self, simhashes: bytes) -> None: ...
    def erase(self, simhash: int, number: int) -> None:
        """One of those inserted, by number in the order of insertion."""

    def split(self, buckets: int) -> tuple[int, int]:
        """At most so many, and to the end of the number of bits. Returns the bits of a bucket and the frontier."""

    def search(self, queries: bytes, distance_max: int, scans: int = 0) -> bytes:
        """Rows of uint32 query, uint32 distance, uint32 stored (in the order of insertion)."""

class FuzzyIndex:
    """Matches are rows of uint32 offset, uint16 distance, uint16 exact, uint64 prefix hash."""

    def __init__(self, shingle: int, scans: int = 0) -> None:
        """`scans`: 0 the fastest that this machine runs, 1 the next, a large number the portable ones."""

    def add_context(self, context: int, block_size: int) -> None: ...
    def drop_context(self, context: int) -> None: ...
    def insert(self, context: int, prefix_hashes: bytes, token_ids: bytes) -> None: ...
    def remove(self, context: int, prefix_hashes: bytes) -> None: ...
    def prefixes(self, context: int) -> bytes: ...
    def exact(
        self, context: int, token_ids: bytes, matches_max: int, window: int, windows_max: int
    ) -> tuple[bytes, int]:
        """Of the windows from `window` on, at most so many of them and about as many matches; and the next window.

        Window 0 comes behind all slices of putting the context's backlog in the tables.
        """

    @staticmethod
    def select(weights: bytes, block_size: int) -> bytes:
        """uint32 offsets of windows that do not overlap, with the largest sum of uint32 weights (0: never)."""

    def statistics(self) -> tuple[int, int, int, int, int, int, int, int, int]: ...

class NearQuery:
    def __init__(
        self,
        index: FuzzyIndex,
        context: int,
        token_ids: bytes,
        offsets: bytes,
        distance_max: int,
        matches_max: int,
    ) -> None: ...
    def step(self, work_max: int) -> bool:
        """A slice of the search; true when it is done."""

    def take(self, matches_max: int) -> tuple[bytes, bool]:
        """Behind the last step: the next matches, about so many; and whether they are the last."""

# -- wire: raw spans of msgpack or JSON to buffers (native/wire.hpp)

Opened: TypeAlias = bytes | list[bytes] | dict[str, bytes]

class WireError(ValueError):
    """A span that is not what it should be; `str(error)` is a sentence.

    `fault` is one word: not_array, truncated, trailing, syntax, range, float, boolean, null, text, bytes,
    empty, hex, nested_array, other, too_many. `index` is the element at fault.
    """

    fault: str
    index: int

def msgpack_token_ids(data: Buffer) -> bytes:
    """An array of integers in 0..2^32-1, as uint32."""

def msgpack_hashes(data: Buffer) -> bytes:
    """An array of integers in -2^63..2^64-1 or byte strings, as uint64.

    Negative ones as two's complement, bytes by their last 8 read big-endian.
    """

def json_token_ids(data: Buffer) -> bytes:
    """The text of an array of integers in 0..2^32-1, as uint32."""

def json_hashes(data: Buffer) -> bytes:
    """The text of an array of integers in -2^63..2^64-1 or hexadecimal strings, as uint64."""

def json_unsigned(data: Buffer) -> bytes:
    """The text of an array of integers in 0..2^64-1, as uint64."""

def msgpack_unsigned(data: Buffer) -> bytes:
    """An array of integers in 0..2^64-1, as uint64."""

def json_cut(data: Buffer, numbers_max: int, arrays_max: int) -> tuple[bytes, list[bytes]] | None:
    """What is left of a JSON text when its arrays of token ids and hashes are cut out, and their buffers.

    In the place of each array stands its number (native/json_cut.hpp). None for a text that is not
    understood, an array that its parser refuses, or more of either than wanted; what is left may be
    malformed, and is so exactly when the text is.
    """

def json_child_count(data: Buffer, count_max: int) -> int:
    """Values directly in an array or object of valid JSON, counted as far as `count_max` + 1."""

def msgpack_child_count(data: Buffer) -> int:
    """Values directly in an array or map (two an entry); 0 for anything else."""

def msgpack_children(data: Buffer, children_max: int) -> list[bytes] | dict[str, bytes]:
    """The raw spans of the children of an array, or of a map by its text keys.

    However deep they are nested, there is no recursion. A container of more than `children_max` values is
    refused (a map has two an entry).
    """

def msgpack_grandchildren(data: Buffer, children_max: int) -> list[Opened] | dict[str, Opened]:
    """The same, with children that are arrays or maps opened in their turn.

    A map with a key that is not text stays raw.
    """

PlainRemoved: TypeAlias = tuple[int, int, bytes, str | None, int]
PlainStored: TypeAlias = tuple[
    int, int, bytes, str | None, int, int | None, bytes, int, str | None, str | None, bytes | None
]

def msgpack_events(
    data: Buffer, children_max: int
) -> tuple[bytes | float, bytes | int | None, list[bytes | PlainRemoved | PlainStored]] | None:
    """A batch in one pass: its time and rank, raw where they are not the usual ones, and its events
    (native/event_payload.hpp).

    A plain event is (start and end of its span, block hashes, medium, group) and, when blocks were stored, also
    (parent, token ids, block size, LoRA name, kind of its group, raw extra keys); any other is its span. None
    for a payload that is no array of a time, events and perhaps a rank, or that ends too early or too late.
    """

class PlainBatch:
    """A posted batch of the usual events, from its bytes into the index (native/plain_batch.hpp). `tiers` are the media
    by name, in lower case; `kinds` are those of groups that are indexed. None: it is not plain, and holds nothing now."""

    BYTES_MAX: int  # of a payload or body

    def __init__(self, tiers: list[tuple[str, int]], kinds: list[str]) -> None: ...
    def read_msgpack(self, payload: Buffer, events_max: int) -> tuple[float | None, int | None] | None:
        """Time and rank of the payload of an engine."""

    def read_json(
        self, body: Buffer, events_max: int
    ) -> tuple[str, str | None, str | None, int, int | None, float | None] | None:
        """Pod, model, adapter, rank, number and time of a body of posted events."""

    def kind(self) -> tuple[int, int, int, int, str | None, bool]:
        """Events; those of them that store, with their tier, block size and adapter; whether any is of a tier other than
        the GPU's."""

    def events(self) -> list[tuple[int, int, bytes] | tuple[int, int, bytes, int | None, bytes]]:
        """(tier, group, block hashes), and where blocks are stored (.., parent, token ids)."""

    def apply(
        self, index: PrefixIndex, source: int, context: int, now: int, count_copies: bool
    ) -> tuple[int, int, int, int]:
        """Blocks stored, removed, that wait for their parent, and that are not known."""

def request_head(data: bytes) -> tuple[str, bytes, list[tuple[bytes, bytes]], int, int] | None:
    """The head of a plain POST request at the beginning of `data`: path, query string, the headers that an answer may
    depend on (names in lower case), bytes of the head, bytes of the body. None for any other, and for one that has not
    come whole."""

class HeadBook:
    """Heads of plain POST requests that came before, by number (native/head_book.hpp)."""

    def __init__(self) -> None: ...
    def find(self, data: bytes) -> tuple[int | None, int, int] | None:
        """(number, bytes of the head, bytes of the body); the number is None for a head that is not known. None where
        `request_head` is."""

    def put(self, data: bytes) -> tuple[int | None, int, int] | None:
        """The same, known from now on: by the next number, or by 0 and all others are forgotten. A head with a key, or of
        one request only, gets no number."""

def scan_json(data: Buffer) -> bytes | None:
    """`json_unsigned` for the usual texts, None for others (native/digit_scan.hpp)."""

def scan_json_by_words(data: Buffer) -> bytes | None:
    """The same without vector instructions."""

def scan_json_tokens(data: Buffer) -> bytes | None:
    """The same for numbers of 4 bytes, with what this processor has (native/digit_scan_avx2.hpp)."""
