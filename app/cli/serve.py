"""`kvindexer serve`: every option is a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.config import PREFIX, Settings, load_settings


def _setting(name: str, *flags: str) -> Any:
    """An option whose meaning is that of a setting, said once in app/config.py."""
    field = Settings.model_fields[name]
    default = "" if field.default in ((), None) else f" Default {field.default}."
    return typer.Option(
        *(flags or (f"--{name.replace('_', '-')}",)),
        help=f"{field.description}{default} [{PREFIX}{name.upper()}]",
        show_default=False,
    )


def serve(
    host: Annotated[str | None, _setting("host")] = None,
    port: Annotated[int | None, _setting("port")] = None,
    pod: Annotated[list[str] | None, _setting("pods", "--pod")] = None,
    pods_file: Annotated[Path | None, _setting("pods_file")] = None,
    discovery_dns: Annotated[list[str] | None, _setting("discovery_dns")] = None,
    discovery_kubernetes: Annotated[str | None, _setting("discovery_kubernetes")] = None,
    api_keys_file: Annotated[Path | None, _setting("api_keys_file")] = None,
    tls_certificate: Annotated[Path | None, _setting("tls_certificate")] = None,
    tls_key: Annotated[Path | None, _setting("tls_key")] = None,
    tls_client_ca: Annotated[Path | None, _setting("tls_client_ca")] = None,
    ttl_s: Annotated[float | None, _setting("ttl_s")] = None,
    contexts_max: Annotated[int | None, _setting("contexts_max")] = None,
    prefixes_per_context_max: Annotated[int | None, _setting("prefixes_per_context_max")] = None,
    prefixes_max: Annotated[int | None, _setting("prefixes_max")] = None,
    block_size_default: Annotated[int | None, _setting("block_size_default")] = None,
    body_bytes_max: Annotated[int | None, _setting("body_bytes_max")] = None,
    tokens_max: Annotated[int | None, _setting("tokens_max")] = None,
    zmq_disconnect_deadline_s: Annotated[float | None, _setting("zmq_disconnect_deadline_s")] = None,
    http_silence_deadline_s: Annotated[float | None, _setting("http_silence_deadline_s")] = None,
    log_level: Annotated[str | None, _setting("log_level")] = None,
    log_format: Annotated[str | None, _setting("log_format")] = None,
    access_log_every: Annotated[int | None, _setting("access_log_every")] = None,
) -> None:
    """Start the indexer: one process, no other service. Every setting has a KVINDEXER_... variable too."""
    options = {**locals(), "pods": tuple(pod) if pod else None}
    options["discovery_dns"] = tuple(discovery_dns) if discovery_dns else None
    del options["pod"]
    settings = load_settings(**{name: value for name, value in options.items() if value is not None})
    # Imported here: the native core comes with it.
    from app.serving.serving import run

    raise typer.Exit(0 if run(settings) else 1)
