# SPDX-License-Identifier: Apache-2.0
"""Family M_chat_templates: conversations rendered by `PromptEncoder`, and the token that ends a turn.

Templates are those of `tests/support/models/chat_families.py`. Conversations with tools need the sentences of the
published template; they are rendered where TRL is installed, which ships it.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.golden_families import Outputs
from tests.support.models.chat_families import FAMILIES as CHAT_FAMILIES
from visalign.adapters import PromptEncoder
from visalign.errors import UserError

FILES = {
    "Qwen2.5-Instruct": "qwen2_5", "Qwen3": "qwen3", "Qwen3-Instruct-2507": "qwen3_instruct_2507",
    "Llama 3": "llama3", "Llama 3.1": "llama3_1", "Llama 3.2": "llama3_2",
}  # fmt: skip
OPTIONS = ("date_string", "enable_thinking")


def _published(name: str) -> str | None:
    spec = find_spec("trl") if name in FILES else None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [Path(folder, "chat_templates", f"{FILES[name]}.jinja") for folder in folders]
    return next((file.read_text() for file in files if file.is_file()), None)


def _chat_template(case: Any) -> Outputs | None:
    name, messages = case.params["template"], case.inputs["messages"]
    if name not in CHAT_FAMILIES or (name == "Qwen3" and "</think>" in str(messages)):
        return None
    options = {key: case.params[key] for key in OPTIONS if key in case.params} | {"date_string": "26 Nov 2026"}
    template = None
    if tools := case.inputs.get("tools"):
        template = _published(name) if name in FILES else CHAT_FAMILIES[name].template
        if template is None:
            return None
        options["tools"] = tools
    tokenizer = CHAT_FAMILIES[name].tokenizer()
    encoder = PromptEncoder(tokenizer, chat_template=template, template_options=options)
    closed = not case.params.get("add_generation_prompt", True)
    try:
        text = encoder.render(messages, closed=closed)
    except UserError:
        return {"refused": True}
    if "reads_parts" in case.expected:
        joined = "\n\n".join(part["text"] for part in messages[0]["content"])
        return {"reads_parts": text != encoder.render([{"role": "user", "content": joined}])}
    behind = ""
    if "after_closed_answer" in case.expected:
        behind = encoder.render(messages[:2], closed=True).rpartition(messages[1]["content"])[2]
    return {
        "rendered": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "length": len(text),
        "tail": text[-len(case.expected.get("tail", "")) :],
        "end_of_turn": tokenizer.convert_ids_to_tokens(encoder.turn_end() or 0),
        "after_closed_answer": behind,
    }


FAMILIES = {"M_chat_templates": _chat_template}
