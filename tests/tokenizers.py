"""A tiny tokenizer, trained here, in the form in which models come: a folder with a chat template.

Every byte is a token, so any text can be written; a few pairs are merged, so that text is not its bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END, TURN = "<s>", "</s>", "<turn>"

# Text content; the tools as JSON; the answer is opened on request; a variable of its own.
TEMPLATE = (
    "{% if tools %}<turn>tools {{ tools | tojson }}</s>{% endif %}"
    "{% for message in messages %}<turn>{{ message['role'] }} {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.name }}={{ call.function.arguments.place }}{% endfor %}"
    "</s>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant {% if mood is defined %}{{ mood }} {% endif %}{% endif %}"
)
# Content in parts.
PARTS_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}"
    "{% for part in message.content %}[{{ part.text }}]{% endfor %}</s>{% endfor %}"
)


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, *, remote_code: bool = False) -> Tokenizer:
    """Writes the folder of a model's tokenizer, and returns the tokenizer itself to compare with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BEGIN, END, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat and the bat sat on that mat"] * 4, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
    }
    if template is not None:
        config["chat_template"] = template
    if remote_code:
        config["tokenizer_class"] = "OwnTokenizer"
        config["auto_map"] = {"AutoTokenizer": ["own.OwnTokenizer", None]}
        (folder / "own.py").write_text("raise SystemExit('this must never run')\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
