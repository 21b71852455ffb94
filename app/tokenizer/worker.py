"""The child process: frames on standard input, answers on standard output, one prompt at a time.

As the engine does it: text is tokenised with its special tokens; messages are rendered by the chat template
and tokenised without, as the template writes them itself. Code that comes with a tokenizer is never run.
At most `tokenizers_max` tokenizers are kept; the one not used for longest goes.

A repository is looked for on this machine first; only then is the hub asked, once and with a deadline, before
anything is downloaded: the downloads themselves try for most of a minute before they say that there is no
network. The child ends when its input does, that is when the service ends, however it ends.
"""

from __future__ import annotations

import array
import logging
import os
import signal
import sys
from collections import OrderedDict
from typing import Any, BinaryIO, cast

import msgspec

from app.config import LogFormat, LogLevel
from app.observability import logs
from app.observability.correlation import CURRENT
from app.tokenizer.chat import Refused, conversation, template_tools, template_variables, wants_parts
from app.tokenizer.prompts import LENGTH, Answer, Fault, Job, Prompt

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0

# Arguments of apply_chat_template itself: from a request they would change what is asked, not the text.
_RESERVED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"}
    | {"messages", "tokenize", "tools"}
)
# What a template, which comes with the model, can raise over messages, which come from anybody.
_RENDER_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

INSTEAD = "send token_ids, or name a folder for the model in KVINDEXER_TOKENIZERS"


class Failed(Exception):
    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


class Worker:
    def __init__(self, tokenizers_max: int) -> None:
        self._max = tokenizers_max
        self._tokenizers: OrderedDict[str, Any] = OrderedDict()
        self._loaded = 0
        self._evicted = 0

    def answer(self, job: Job) -> Answer:
        self._loaded = self._evicted = 0
        fault, detail, field, ids = None, "", "", b""
        try:
            ids = _tokenise(self._tokenizer(job.source), job.prompt)
            if len(ids) // 4 > job.tokens_max:
                fault, detail, ids = Fault.TOO_LONG, f"the prompt has {len(ids) // 4} tokens", b""
        except Failed as error:
            fault, detail = error.fault, str(error)
        except Refused as error:
            fault, detail, field = Fault.REFUSED, error.detail, error.field
        return Answer(ids, fault, detail, field, self._loaded, self._evicted)

    def _tokenizer(self, source: str) -> Any:
        found = self._tokenizers.get(source)
        if found is None:
            found = _load(source)
            self._loaded += 1
            if len(self._tokenizers) >= self._max:
                self._tokenizers.popitem(last=False)
                self._evicted += 1
            self._tokenizers[source] = found
        self._tokenizers.move_to_end(source)
        return found


def _tokenise(tokenizer: Any, prompt: Prompt) -> bytes:
    if prompt.text is not None:
        text, special = _value(prompt.text, prompt.notation, "text"), True
        if not isinstance(text, str):
            raise Refused("text is a string", field="text")
    else:
        text, special = _render(tokenizer, prompt), False
    special = special if prompt.add_special_tokens is None else prompt.add_special_tokens
    try:
        return array.array("I", tokenizer.encode(text, add_special_tokens=special)).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(
            f"the text cannot be tokenised: {error}", field="messages" if prompt.messages else "text"
        ) from None


def _render(tokenizer: Any, prompt: Prompt) -> str:
    import jinja2

    messages = _value(prompt.messages, prompt.notation, "messages")
    tools = template_tools(_value(prompt.tools, prompt.notation, "tools"))
    arguments = _value(prompt.template_arguments, prompt.notation, "chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise Refused("chat_template_kwargs is an object", field="chat_template_kwargs")
    for name in arguments:
        if name in _RESERVED:
            raise Refused(f"{name} is no argument of a template", field="chat_template_kwargs")
    try:
        template = tokenizer.get_chat_template(None, tools=tools)
    except ValueError:
        detail = (
            "the model's tokenizer has no chat template: add chat_template.jinja to its folder, or send text"
        )
        raise Refused(f"{detail} or token_ids", field="messages") from None
    used = template_variables(template)
    turns = conversation(messages, wants_parts=wants_parts(template))
    try:
        rendered = tokenizer.apply_chat_template(
            turns,
            tools=tools,
            chat_template=template,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            tokenize=False,
            **{name: value for name, value in arguments.items() if name in used},
        )
    except (jinja2.TemplateError, *_RENDER_FAULTS) as error:
        raise Refused(f"the chat template refuses the messages: {error}", field="messages") from None
    return str(rendered)


def _value(raw: bytes | None, notation: str, field: str) -> Any:
    if raw is None:
        return None
    try:
        return (msgspec.json if notation == "json" else msgspec.msgpack).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"{field} cannot be read: {error}", field=field) from None


# -- loading


def _load(source: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if os.path.isabs(source):
        if not os.path.isdir(source):
            raise Failed(Fault.UNUSABLE, f"there is no folder {source}: {INSTEAD}")
        return _from_pretrained(source, local=True)
    if os.path.isdir(source):
        raise Failed(Fault.UNUSABLE, f"{source} is the name of a folder here: give its absolute path")
    try:
        return _from_pretrained(source, local=True)
    except Failed:
        _ask_hub(source)
        return _from_pretrained(source, local=False)


def _from_pretrained(source: str, *, local: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    except (OSError, ImportError, LookupError, TypeError, ValueError) as error:
        if "trust_remote_code" in str(error):
            detail = f"the tokenizer of {source} is code of its own, which is never run here: send token_ids"
            raise Failed(Fault.UNUSABLE, detail) from None
        reason = str(error).partition("\n")[0]
        raise Failed(
            Fault.UNUSABLE, f"no tokenizer can be loaded from {source} ({reason}): {INSTEAD}"
        ) from error


def _ask_hub(name: str) -> None:
    """Raises Failed unless the hub answers and has the repository for us.

    With our own client: that of huggingface_hub is another one in each of its major releases.
    """
    import httpx
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        detail = f"{name!r} is neither the absolute path of a folder nor a name of the hub: {INSTEAD}"
        raise Failed(Fault.UNUSABLE, detail) from None
    missing = f"{name!r} is not on this machine and the hub {constants.ENDPOINT}"
    if constants.HF_HUB_OFFLINE:
        raise Failed(Fault.UNAVAILABLE, f"{missing} is not to be asked (HF_HUB_OFFLINE): {INSTEAD}")
    token = get_token()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        url = f"{constants.ENDPOINT}/api/models/{name}"
        status = httpx.get(url, headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True).status_code
    except httpx.HTTPError as error:
        raise Failed(Fault.UNAVAILABLE, f"{missing} cannot be reached ({error}): {INSTEAD}") from None
    if status in (401, 403, 404):
        raise Failed(
            Fault.UNUSABLE, f"{missing} has no such repository that we may read ({status}): {INSTEAD}"
        )
    if status != 200:
        raise Failed(Fault.UNAVAILABLE, f"{missing} answers {status}: {INSTEAD}")


# -- frames


def main() -> None:
    # Ctrl-C reaches the whole group of processes: the service ends this one by closing its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizers_max, log_level, log_format = sys.argv[1:]
    logs.configure(cast(LogLevel, log_level), cast(LogFormat, log_format))
    serve(Worker(int(tokenizers_max)), sys.stdin.buffer, answers)


def serve(worker: Worker, jobs: BinaryIO, answers: BinaryIO) -> None:
    decoder, encoder = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Encoder()
    while len(head := jobs.read(LENGTH.size)) == LENGTH.size:
        job = decoder.decode(jobs.read(LENGTH.unpack(head)[0]))
        CURRENT.set(job.asked_by)
        try:
            answer = worker.answer(job)
        except Exception:  # the outermost loop: a fault in a tokenizer's code must not end the others
            logger.exception("a prompt for %s cannot be tokenised", job.source)
            answer = Answer(
                fault=Fault.UNAVAILABLE, detail=f"the tokenizer of {job.source} failed; the log has more"
            )
        payload = encoder.encode(answer)
        answers.write(LENGTH.pack(len(payload)) + payload)
        answers.flush()


if __name__ == "__main__":
    main()
