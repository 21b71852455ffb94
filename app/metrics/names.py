"""Names and help texts of the metrics whose figures other parts count, by the key that the part gives each figure.

Prometheus shows a help text alone, so each one says by itself what it is about.
"""

from __future__ import annotations

# A name is without the prefix kvindexer_, and that of a counter without the suffix _total.
INDEX_GAUGES = {
    "contexts": ("index_contexts", "Contexts: model, LoRA adapter and block size"),
    "prefixes": ("index_prefixes", "Index entries: one for each prefix of each context"),
    "holder_sets": ("index_holder_sets", "Distinct sets of holders"),
    "engine_keys": ("index_engine_keys", "Engine hashes that name a prefix"),
    "copies": ("index_copies", "Engine hashes with more than one copy"),
    "orphan_blocks": ("index_orphan_blocks", "Blocks that wait for a parent not seen yet"),
    "speculative_blocks": ("index_speculative_blocks", "Blocks that routers have announced"),
    "claims": ("index_claims", "Blocks with an owner, one for each owner, rank and tier"),
    "bytes": ("index_bytes", "Memory of the index's tables in bytes"),
}
INDEX_COUNTERS = {
    "speculative_refused": ("index_speculative_refused", "Announced blocks refused: speculative_blocks_max"),
    "claims_refused": (
        "index_claims_refused",
        "Blocks stored without the owner that was named: owner_claims_max",
    ),
}
# The figure of the index -> the setting that made entries go.
EVICTION_CAUSES = {
    "expired": "ttl_s",
    "evicted": "prefixes_per_context_max",
    "evicted_in_all": "prefixes_max",
    "contexts_evicted": "contexts_max",
}
ORPHAN_CAUSES = {"orphans_dropped": "orphan_blocks_max", "orphans_expired": "ttl_s"}
QUERY_COUNTERS = {
    "matches": ("match_queries", "Match queries answered"),
    "matches_hit": ("match_hits", "Match queries for which some pod holds a block"),
    "tokens_asked": ("match_asked_tokens", "Tokens of the prompts that were asked about"),
    "tokens_matched": (
        "match_matched_tokens",
        "Tokens of the prompts that were asked about which the best pod holds",
    ),
}
SOURCE_COUNTERS = {
    "gaps": ("source_gaps", "Gaps in the sequence numbers"),
    "replays": ("source_replays", "Replays begun"),
    "restarts": ("source_restarts", "Engine restarts seen"),
    "orphans": ("source_orphans", "Blocks that came before their parent"),
    "duplicates": ("source_duplicates", "Batches seen before and left out"),
    "rejected": ("source_rejected", "Events skipped"),
    "unknown_blocks": (
        "source_unknown_blocks",
        "Blocks named by removals and placeholders that the source does not hold",
    ),
}
STREAM_GAUGES = {
    "dumps_running": "Dumps that are being read",
    "live_subscribers": "Readers of the live feed",
}
STREAM_COUNTERS = {
    "dumps_refused": "Dumps refused: dumps_max",
    "live_refused": "Readers of the live feed refused: live_subscribers_max",
    "live_dropped": "Live events that a slow reader lost: live_queue_events_max",
}
# Figures of the ZMQ ingest: the metric is kvindexer_zmq_ and the key.
ZMQ_GAUGES = {
    "queued_batches": "Received batches that wait for the writer",
    "queued_bytes": "Bytes of received batches that wait for the writer",
    "held_bytes": "Bytes of live batches held back during replays",
    "replays_running": "Replays under way",
    "replays_waiting": "Replays that wait for their turn",
}
ZMQ_COUNTERS = {
    "messages": "Messages received, live and replayed",
    "message_bytes": "Bytes of the payloads of received messages",
    "messages_malformed": "Messages that are not the frames of a batch",
    "open_failures": "Sockets that could not be opened; each is tried again",
    "handshake_failures": "Connections that ended before a ZMQ handshake did; each is tried again",
    "faults": "Faults of ours in the receiver",
    "duplicates": "Batches that came again and were dropped",
    "probes": "Replays asked for without a known gap, to find out whether a batch was lost",
    "replay_timeouts": "Replays cut short because no reply came",
    "batches_applied": "Batches handed to the service",
    "batches_unreadable": "Batches whose payload cannot be read",
    "batches_refused": "Batches that the service refused",
    "batches_unfollowed": "Batches whose pod was removed while they waited",
    "drain_slices": "Slices in which the queue was emptied",
    "held_overflows": "Times that the room for held back batches was full",
    "queue_full_pauses": "Times that reading stopped because the queue was full",
}

# Figures of a part of the application: the metric is kvindexer_, the part, _ and the key.
PART_GAUGES = {
    "tokenizer": {
        "waiting": "Prompts that wait to be tokenised or are being tokenised",
        "cache_entries": "Prompts whose token ids are kept",
        "cache_bytes": "Bytes of the token ids that are kept",
    },
    "loads": {"known": "Pods whose load was read lately"},
    "access": {"keys": "API keys that are known now"},
    "connections": {"open": "HTTP connections"},
    "bodies": {"bytes": "Bytes of request bodies that have come and are not answered yet"},
    "snapshot": {
        "saved_at_seconds": "Unix time of the newest snapshot; of replicas over Redis, whichever wrote it",
        "saved_bytes": "Bytes of the newest snapshot on disk",
        "restored_blocks": "Blocks that the snapshot at the start brought",
    },
    "hints": {
        "kept": "Hints of blocks that are kept",
        "waiting": "Kept hints whose block waits for its parent",
        "bytes": "Bytes of the metadata of kept hints",
    },
    "replication": {
        "lag_seconds": "Age of the newest group applied here, while the log has newer ones",
        "away_seconds": "Time since the log could be read last; 0 while it can be",
        "partitions_in_trouble": "Partitions of the log that are not read now",
        "outbox_entries": "Accepted entries that the log has not given back yet",
        "outbox_bytes": "Bytes of accepted entries that the log has not given back yet",
    },
    "leases": {
        "held": "Pods whose streams this replica follows",
        "replicas": "Replicas that are alive, this one included",
        "pods": "Pods with a stream, of which one replica each holds the lease",
        "taking": "Leases held that wait for the log before their pod is followed",
    },
    "fuzzy": {
        "contexts": "Contexts whose blocks fuzzy matches find",
        "blocks": "Blocks that fuzzy matches find; removed ones count until they are swept",
        "same_content": "Blocks of the fuzzy index with the tokens of another of its blocks, as far as that is known",
        "backlog": "Blocks that the next fuzzy match has to put into its tables first",
        "asleep": "Contexts of which no fuzzy match was asked, or none since more blocks came than they held then",
        "unswept": "Removed blocks that are not swept yet; an upper bound",
        "crowded": "Contents that only exact matches find: too many others are nearly the same",
        "bytes": "Memory of the fuzzy index in bytes",
        "asked": "Fuzzy matches that are under way or wait for their turn",
    },
    "owners": {
        "known": "Owners that blocks were stored for",
    },
}
PART_COUNTERS = {
    "tokenizer": {
        "cache_hits": "Prompts whose token ids were kept from before",
        "cache_misses": "Prompts that had to be tokenised",
        "cache_evictions": "Prompts that went: tokenizer_cache_bytes_max",
        "loads": "Tokenizers loaded",
        "unloads": "Tokenizers let go: tokenizers_max",
        "starts": "Processes started to tokenise",
        "failures": "Times that a tokenizer could not be had",
        "refused": "Prompts refused: tokenizer_queue_max",
    },
    "loads": {
        "polls": "Times that a pod was asked for its load",
        "failures": "Times that a pod was asked for its load and gave no answer that can be used",
    },
    "access": {
        "refused_without_key": "Requests refused: no key where one is needed",
        "refused_unknown_key": "Requests refused: a key that is not known",
        "refused_scope": "Requests refused: a key of scope read where write is needed",
        "refused_rate": "Requests refused: rate_requests_per_s",
        "reloads": "Times that the file of keys was taken over",
        "reload_failures": "Looks at the file of keys that found it broken; the keys from before stay",
    },
    "connections": {
        "refused": "Requests refused: connections_max",
        "head_timeouts": "Connections ended: head_timeout_s",
        "body_timeouts": "Connections ended: body_timeout_s",
        "send_timeouts": "Connections ended: send_timeout_s",
        "heads_too_long": "Connections ended: head_bytes_max",
    },
    "bodies": {"refused": "Requests refused: bodies_bytes_max"},
    "snapshot": {
        "saved": "Snapshots written",
        "failed": "Snapshots that could not be written",
        "refused": "Files that were damaged or foreign",
    },
    "replication": {
        "appended_groups": "Groups of entries appended to the log",
        "appended_entries": "Entries appended to the log",
        "append_failures": "Appends that failed; each is tried again",
        "lost_groups": "Groups that Redis had taken and lost before anybody read them; each is appended again",
        "outbox_refused": "Entries refused: redis_outbox_bytes_max",
        "read_groups": "Groups read from the log",
        "read_bytes": "Bytes read from the log",
        "read_failures": "Reads of the log that failed; each is tried again",
        "reconnects": "Times that a partition was read again after reads of it had failed",
        "applied_groups": "Groups of the log that were applied",
        "applied_entries": "Entries of the log that were applied",
        "repeated_groups": "Groups left out because they had come before",
        "early_groups": "Groups left out because Redis had lost the one before; both come again",
        "fenced_entries": "Entries left out because the lease of the pod had passed on",
        "refused_entries": "Entries that were refused when they were applied, such as one past a bound",
        "faults": "Entries left out by a fault of ours",
        "snapshots_loaded": "Snapshots loaded from Redis in place of what was held",
        "logs_begun": "New logs begun with the picture of this replica, because Redis lost data",
        "logs_left": "Times that what was held was forgotten because a new log had begun with nothing",
        "trimmed_groups": "Groups that this replica trimmed from the log, behind a snapshot",
        "unleased_entries": "Entries of followed streams left out because the lease was gone",
        "hashed_blocks": "Blocks accepted here and logged as hashes",
        "raw_blocks": "Blocks accepted here and logged with their tokens",
    },
    "leases": {
        "taken": "Leases taken",
        "lost": "Leases lost without having been given up",
        "handed_over": "Leases handed to a replica that asked",
        "exchanges": "Exchanges with Redis about leases",
        "exchanges_failed": "Exchanges with Redis about leases without an answer in time",
        "granted": "Times that a stream was followed because of a lease",
        "takings_failed": "Times that the log was away when a lease was to be used; each is tried again",
        "outlived": "Leases given back because the log had a newer one",
    },
    "route": {
        "choices_longest_prefix": "Choices by the longest prefix",
        "choices_prefix_and_load": "Choices by prefix and load",
        "choices_round_robin": "Choices in turn",
        "choices_least_loaded": "Choices by load",
        "reserved_blocks": "Blocks announced with a choice",
    },
    "hints": {
        "stored": "Hints that came with blocks",
        "refused": "Metadata that was not kept: no object, or hint_bytes_max",
        "evicted": "Hints that had to go for newer ones: hints_max",
        "cut": "Hints left out of rows: row_hints_max",
    },
    "fuzzy": {
        "queries": "Fuzzy matches answered",
        "asked_tokens": "Tokens of the prompts of fuzzy matches",
        "reusable_tokens": "Tokens of the prompts of fuzzy matches that are held somewhere, exactly or nearly",
        "candidates_dropped": "Stored blocks left out of answers: fuzzy_candidates_max; a lower bound",
        "refused": "Fuzzy matches refused: fuzzy_queue_max",
    },
    "owners": {
        "refused": "Batches refused for a new owner: owners_max",
    },
}
