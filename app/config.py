"""Every setting, once: name, default, bounds and the sentence that docs/operations.md shows.

A setting `ttl_s` is the environment variable KVINDEXER_TTL_S and the option `--ttl-s`; an option wins over
the variable. Nothing else in the package reads the environment. A variable with the prefix but an unknown
name stops the start just like a value that cannot be: a misspelt bound that silently keeps its default is
found in the worst hour.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.auth.api_keys import ApiKey, parse_setting
from app.errors import InvalidInput, InvalidSettings
from app.observability.redaction import redacted_value

PREFIX = "KVINDEXER_"

# Read by the commands that talk to an indexer; the indexer itself leaves them alone.
CLIENT_VARIABLES = frozenset({"KVINDEXER_API_KEY", "KVINDEXER_URL"})

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]


class Settings(BaseSettings):
    """All settings of one process; `load_settings` builds it and turns faults into InvalidSettings."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65_535, description="TCP port to listen on; 0 takes a free one.")
    log_level: LogLevel = Field("info", description="Least severe level that is logged.")
    log_format: LogFormat = Field(
        "console", description="Lines for people (`console`), or one JSON object a line (`json`)."
    )
    access_log_every: int = Field(
        0, ge=0, description="One request of this many is logged, 1 is all of them; 0 none."
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        description="URL that takes OpenTelemetry spans by OTLP over HTTP, such as `http://collector:4318/v1/traces`; "
        "needs the extra `otel`. None: no spans.",
    )
    otlp_requests_every: int = Field(
        100,
        ge=0,
        description="One request of this many gets a span, of those whose caller sends no trace; 0 none. "
        "With a trace, its caller has decided.",
    )

    api_keys: Annotated[tuple[ApiKey, ...], NoDecode] = Field(
        (),
        description="Keys of requests, separated by ',', each as `key:read` or `key:write`; with none no key is needed.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File with a `key:read` or `key:write` a line, beside `api_keys`; read again when it changes.",
    )
    rate_requests_per_s: float = Field(
        0.0,
        ge=0,
        description="Requests a second of one key, or of everybody where no key is needed; past it 429; 0 no bound.",
    )
    rate_burst_requests: int = Field(
        1_000, ge=1, description="Requests that a key which was silent may make at once."
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file of the server's certificate and its chain: with it, HTTPS only."
    )
    tls_key: Path | None = Field(
        None, description="PEM file of its private key, where that is not in the same file."
    )
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities: only clients with a certificate of theirs are served."
    )

    pods: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Pods to register at the start, separated by ';', each as "
        "`name=tcp://host:5557,model=m,replay=tcp://host:5558`.",
    )
    pods_file: Path | None = Field(
        None,
        description="File with one such pod a line; blank lines and lines that start with '#' are skipped. "
        "It is read again when it changes.",
    )
    discovery_dns: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=256,
        description="DNS names with a pod behind each address or SRV record, separated by ';', each as "
        "`name,port=8000`.",
    )
    discovery_dns_server: str | None = Field(
        None, description="DNS server that is asked, as `10.0.0.10:53`; the system's where it is not said."
    )
    discovery_kubernetes: str | None = Field(
        None, min_length=1, description="Label selector of the pods to follow, as `app=vllm`."
    )
    discovery_kubernetes_namespace: str | None = Field(
        None, min_length=1, description="Their namespace; the indexer's own where it is not said."
    )
    discovery_kubernetes_engines: str = Field(
        "port=8000", description="What is said of their engines, as behind the name in `discovery_dns`."
    )
    discovery_kubernetes_api_url: str = Field(
        "https://kubernetes.default.svc",
        pattern=r"^https?://[^\s/]+[^\s]*$",
        description="Where the Kubernetes API answers; `kubectl proxy` gives one outside of a cluster.",
    )
    discovery_kubernetes_account: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="Folder with `token`, `ca.crt` and `namespace` of the service account.",
    )
    discovery_interval_s: float = Field(
        5.0,
        ge=0.05,
        le=3_600,
        description="Seconds between two looks at a place, or at an engine that is silent.",
    )
    discovery_deadline_s: float = Field(
        30.0, ge=0, description="Seconds after which a discovered pod that vanished is dropped."
    )
    pods_max: int = Field(
        10_000, ge=1, description="Pods that can be registered, those that announce themselves included."
    )
    dp_ranks_max: int = Field(
        1_024, ge=1, le=65_536, description="Data-parallel ranks that one pod can have."
    )

    ttl_s: float = Field(
        1_200.0,
        ge=0,
        description="Seconds after which a block that was neither stored nor matched expires; 0 never.",
    )
    contexts_max: int = Field(
        1_000,
        ge=1,
        description="Contexts (model, LoRA adapter, block size); past it the least recently used goes.",
    )
    prefixes_per_context_max: int = Field(
        10_000_000, ge=16, description="Prefixes of one context; past it the least recently seen go."
    )
    prefixes_max: int = Field(
        40_000_000,
        ge=16,
        le=200_000_000,
        description="Prefixes of all contexts together; past it the least recently seen go.",
    )
    orphan_blocks_max: int = Field(
        65_536,
        ge=0,
        description="Blocks that can wait for a parent not seen yet; past it the oldest are dropped.",
    )
    speculative_blocks_max: int = Field(
        262_144,
        ge=0,
        description="Blocks that can be announced by `/v1/prefixes`; past it new ones are refused.",
    )
    speculative_ttl_s_max: float = Field(
        60.0, gt=0, description="Longest life in seconds that `/v1/prefixes` can ask for."
    )
    hints_max: int = Field(
        65_536,
        ge=0,
        description="Hints (`metadata` of stored blocks) that are kept; past it the oldest goes; 0 keeps none.",
    )
    hint_bytes_max: int = Field(
        1_024, ge=2, description="Bytes of one block's `metadata`; longer ones are not kept."
    )
    row_hints_max: int = Field(
        16, ge=1, description="Hints in one row of a match; past it those of shorter prefixes are left out."
    )
    block_size_default: int = Field(
        16,
        ge=1,
        le=65_536,
        description="Tokens a block where neither the request, the pod nor an event has said.",
    )
    count_copies: bool = Field(
        True,
        description="Count the copies that an engine stores of one block: it is gone with the last one.",
    )
    sweep_interval_s: float = Field(
        0.02,
        ge=0.01,
        le=60,
        description="Seconds between two slices of expiry, sweeping and deadlines; 0.1 at least while nothing is swept.",
    )
    sweep_visits_max: int = Field(
        4_096,
        ge=1,
        description="Index entries that one slice of sweeping looks at: 0.2 to 0.4 ms in all, in parts.",
    )
    sweep_pause_s: float = Field(
        30, ge=0, le=3_600, description="Seconds of rest after a sweep has seen the whole index."
    )

    body_bytes_max: int = Field(
        16 * 1024 * 1024, ge=1_024, description="Bytes of one request body; past it 413."
    )
    bodies_bytes_max: int = Field(
        256 * 1024 * 1024,
        ge=1_024,
        description="Bytes of all request bodies that have come and are not answered yet; past it 503.",
    )
    tokens_max: int = Field(
        1_048_576, ge=1, description="Token ids, or prefix hashes, of one query; past it 422."
    )
    events_max: int = Field(65_536, ge=1, description="Events of one posted batch; past it 422.")
    dumps_max: int = Field(2, ge=1, description="Dumps that run at once; past it 503.")
    live_subscribers_max: int = Field(64, ge=1, description="Readers of the live feed; past it 503.")
    live_queue_events_max: int = Field(
        1_000,
        ge=1,
        description="Events that wait for a slow reader of the live feed; past it they are dropped.",
    )
    live_heartbeat_s: float = Field(
        15.0, gt=0, description="Seconds of silence after which the live feed sends a comment."
    )
    connections_max: int = Field(
        10_000,
        ge=1,
        description="HTTP connections; past it 503 for whoever comes, but for probes and metrics.",
    )
    keep_alive_s: int = Field(75, ge=1, description="Seconds that an idle HTTP connection is kept.")
    shutdown_grace_s: int = Field(
        5, ge=0, description="Seconds that requests in progress may take at the end."
    )

    zmq_disconnect_deadline_s: float = Field(
        30.0, gt=0, description="Seconds after which a rank whose ZMQ stream is disconnected holds nothing."
    )
    zmq_queue_batches_max: int = Field(
        8_192,
        ge=1,
        description="Received batches that wait for the writer; past it reading stops for a while.",
    )
    zmq_queue_bytes_max: int = Field(
        128 * 1024 * 1024, ge=1_024, description="Bytes of such batches; past it reading stops for a while."
    )
    zmq_held_bytes_max: int = Field(
        256 * 1024 * 1024,
        ge=1_024,
        description="Bytes of live batches held back during replays; past it they are asked for later.",
    )
    zmq_message_bytes_max: int = Field(
        64 * 1024 * 1024, ge=1_024, description="Bytes of one ZMQ message; a longer one ends its connection."
    )
    http_silence_deadline_s: float = Field(
        1_200.0,
        gt=0,
        description="Seconds after which a rank that posts by HTTP and fell silent holds nothing.",
    )
    ready_grace_s: float = Field(
        10.0,
        ge=0,
        description="Seconds after the start for which /readyz waits for every configured ZMQ pod.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description="Redis (6.2 or later) or Valkey that replicas share, as `redis://host:6379/0`, or `rediss://` for "
        "TLS, with user and password where there are some, what is special in them as %XX; none: a lone process.",
    )
    redis_cluster: bool = Field(False, description="That URL is of a node of a Redis Cluster.")
    redis_namespace: str = Field(
        "kvindexer",
        pattern=r"^[A-Za-z0-9_.-]{1,100}$",
        description="Begins the names of all keys; replicas of one namespace are replicas of each other.",
    )
    redis_partitions: int = Field(
        8, ge=1, le=256, description="Streams of the log; fixed for a namespace from its first entry on."
    )
    replica_id: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Name of this replica; none: host name and process id.",
    )
    redis_timeout_s: float = Field(
        3.0, gt=0, description="Seconds that Redis may take to answer; past it the connection is made anew."
    )
    redis_answer_timeout_s: float = Field(
        5.0, gt=0, description="Seconds that a change waits to be in the log and applied here; past it 503."
    )
    redis_outbox_bytes_max: int = Field(
        64 * 1024 * 1024,
        ge=1_024,
        description="Bytes of accepted entries that the log has not given back yet; past it 503.",
    )
    redis_lag_s_max: float = Field(
        10.0, gt=0, description="Seconds behind the log past which /readyz says no."
    )
    redis_lease_ttl_s: float = Field(
        2.0,
        ge=0.2,
        le=60,
        description="Seconds after which the pods of a replica that died are followed by the others.",
    )
    redis_keep_s: float = Field(
        60.0, ge=0.1, description="Seconds that an entry stays in the log at the least, in a snapshot or not."
    )
    snapshot_path: Path | None = Field(
        None,
        description="File for snapshots of all that is held, read at the start; the one before stays beside it.",
    )
    snapshot_interval_s: float = Field(60.0, ge=1, description="Seconds between two snapshots.")
    snapshot_grace_s: float = Field(
        20.0,
        ge=0,
        description="Seconds that the last snapshot, at the end, may take; past it the one before stays.",
    )

    head_bytes_max: int = Field(
        65_536, ge=4_096, description="Bytes of the head of one request; past it 431."
    )
    head_timeout_s: float = Field(
        10.0,
        ge=1,
        description="Seconds that a connection may take to send the head of a request; past it 408.",
    )
    body_timeout_s: float = Field(
        60.0, ge=1, description="Seconds that the body of a request may take to come; past it 408."
    )
    send_timeout_s: float = Field(
        60.0,
        ge=1,
        description="Seconds for which an answer may wait for its reader to take any of it; past it the connection ends.",
    )

    queries_max: int = Field(1_024, ge=1, description="Queries of one batch match; past it 422.")
    route_decay_s: float = Field(
        10.0,
        gt=0,
        description="Seconds in which a choice of `/v1/route` counts for less by a factor e, as load of its pod.",
    )
    loads_interval_s: float = Field(
        1.0, ge=0.05, description="Seconds between two looks at the metrics of pods with a `metrics_url`."
    )
    loads_stale_s: float = Field(
        5.0, gt=0, description="Seconds after which a load that was read there counts no more."
    )
    loads_bytes_max: int = Field(
        8 * 1024 * 1024, ge=1_024, description="Bytes of one pod's metrics; a longer answer is a failure."
    )

    fuzzy: bool = Field(
        True,
        description="Keep what `/v1/fuzzy-match` needs: 24 bytes and 0.05 us a block until it is asked, then 40 and 0.3.",
    )
    fuzzy_tokens_max: int = Field(
        32_768, ge=1, le=2**24, description="Tokens of one prompt of `/v1/fuzzy-match`; past it 422."
    )
    fuzzy_candidates_max: int = Field(
        64,
        ge=1,
        le=4_096,
        description="Stored blocks that `/v1/fuzzy-match` considers for one place of a prompt, the best first.",
    )

    fuzzy_queue_max: int = Field(
        64,
        ge=1,
        description="Prompts of `/v1/fuzzy-match` that are under way or wait for their turn; past it 503.",
    )
    owners_max: int = Field(
        10_000,
        ge=1,
        description="Owners that have blocks, as posted events name them; past it a new one is refused with 422.",
    )
    owner_claims_max: int = Field(
        4_000_000,
        ge=0,
        description="Blocks with an owner, one for each owner, rank and tier (about 20 bytes); past it they have none.",
    )

    tokenizers: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Tokenizers for text and chat, separated by ',', each as `model=folder` or `model=hub/name`.",
    )
    tokenizer_hub: bool = Field(
        True,
        description="Look for the tokenizer of a served model that is not named there under the model's own name: "
        "an absolute path, or a repository of the hub.",
    )
    tokenizer_processes: int = Field(1, ge=1, le=64, description="Processes that tokenise.")
    tokenizers_max: int = Field(
        8, ge=1, description="Tokenizers that one of them keeps; past it the least recently used goes."
    )
    tokenizer_queue_max: int = Field(256, ge=1, description="Prompts that wait to be tokenised; past it 503.")
    tokenizer_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that a prompt may take, loading included; past it 503."
    )
    tokenizer_retry_s: float = Field(
        30.0, ge=0, description="Seconds before a tokenizer that could not be had is asked for again."
    )
    tokenizer_cache_bytes_max: int = Field(
        64 * 1024 * 1024, ge=0, description="Bytes of token ids kept for prompts that come again."
    )

    @field_validator("api_keys", mode="before")
    @classmethod
    def _parse_api_keys(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                return parse_setting(value)
            except InvalidInput as error:
                raise ValueError(str(error)) from None
        return value

    @field_validator("tokenizers", mode="before")
    @classmethod
    def _split_tokenizers(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("tokenizers")
    @classmethod
    def _check_tokenizers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        models = [part.partition("=")[0].strip() for part in value]
        for part, model in zip(value, models, strict=True):
            if not model or not part.partition("=")[2].strip():
                raise ValueError(f"{part!r} is not model=folder or model=hub/name")
            if models.count(model) > 1:
                raise ValueError(f"model {model!r} is there twice")
        return value

    def tokenizer_sources(self) -> dict[str, str]:
        """Model -> the absolute path of a folder, or the name of a repository."""
        pairs = (part.partition("=")[::2] for part in self.tokenizers)
        return {model.strip(): _tokenizer_source(source.strip()) for model, source in pairs}

    @field_validator("pods", "discovery_dns", mode="before")
    @classmethod
    def _split_pods(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(pod.strip() for pod in value.split(";") if pod.strip())
        return value

    @field_validator("*", mode="before")  # the last one is asked first
    @classmethod
    def _refuse_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """What a template or a secret left empty is no way to say "none": of keys it would open the port to everybody."""
        none_is_meant_by = cls.model_fields[info.field_name or ""].default
        is_empty = isinstance(value, str) and not value.strip()
        if is_empty and (none_is_meant_by is None or info.field_name == "api_keys"):
            raise ValueError("it is empty: leave it out where none is meant")
        return value


def _tokenizer_source(source: str) -> str:
    is_path = source.startswith((".", "/", "~"))
    return str(Path(source).expanduser().absolute()) if is_path else source


_WORKERS = "WEB_CONCURRENCY"
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_[0-9]+_(TCP|UDP)")
_LIKENESS_MIN = 0.7


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, with `overrides` (the command line) on top. Raises InvalidSettings."""
    known = {variable(name) for name in Settings.model_fields} | CLIENT_VARIABLES
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            value = redacted_value(name, os.environ[name])
            raise InvalidSettings(
                f"{name}={value}: there is no setting of this name{_meant(name.upper(), known)}"
            )
    workers = os.environ.get(_WORKERS, "").strip()
    if workers not in ("", "1"):
        # uvicorn and gunicorn take it for so many processes on one port, each with a picture of its own.
        raise InvalidSettings(
            f"{_WORKERS}={workers!r}: one process holds the whole picture; start more replicas, each on its port"
        )
    try:
        return Settings(**overrides)
    except ValidationError as error:
        faults = "; ".join(_sentence(fault, overrides) for fault in error.errors(include_url=False))
        raise InvalidSettings(faults) from error


def _sentence(fault: Any, overrides: dict[str, Any]) -> str:
    place = str(fault["loc"][0]) if fault["loc"] else ""
    key = "--" + place.replace("_", "-") if place in overrides else variable(place)
    detail = fault["msg"].removeprefix("Value error, ")
    return f"{key}={redacted_value(variable(place), fault['input'])}: {detail}"


def _meant(name: str, known: set[str]) -> str:
    """What may be behind an unknown name, as the end of a sentence."""
    if _SERVICE_LINK.search(name):
        return "; Kubernetes makes it of a Service: set enableServiceLinks to false in the pod"
    settings = [other.removeprefix(PREFIX) for other in known - CLIENT_VARIABLES]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), sorted(settings), n=1, cutoff=_LIKENESS_MIN)
    return f"; is {PREFIX}{near[0]} meant?" if near else ""
