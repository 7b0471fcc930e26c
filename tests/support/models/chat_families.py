# SPDX-License-Identifier: Apache-2.0
"""Chat templates of public families in words of our own, and byte tokenizers with their special tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.support.models.language import tiny_model
from visalign.adapters.causal_lm.policy import CausalLMPolicy

NO_THOUGHTS = "'<think>\n\n</think>\n\n'"
FIRST_SYSTEM = (
    "{% set system = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
)
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)


def by_role(
    start: str, middle: str, end: str, *, content: str = "m.content", before: str = "", check: str = "",
    assistant: str = "assistant", opened: str = "''", closed: str = "''",
) -> str:  # fmt: skip
    """Template of turns that each have a header with their role; `content`, `opened` and `closed` are Jinja."""
    role = f"{{'assistant': '{assistant}'}}.get(m.role, m.role)"
    return (
        f"{{{{ bos_token }}}}{before}{{% for m in messages %}}{check}"
        f"{{{{ '{start}' + {role} + '{middle}' + {content} + '{end}' }}}}{{% endfor %}}"
        f"{{{{ '{start}{assistant}{middle}' + {opened} if add_generation_prompt else {closed} }}}}"
    )


def by_instruction(start: str, end: str, gap: str, system: str = "'' if later else system", before: str = "") -> str:
    """Template of Mistral: users' messages between marks, with the system text in the first or the last."""
    after = "loop.last or loop.nextitem.role != 'user'"
    return (
        FIRST_SYSTEM + "{% if system %}{% set system = system + '\n\n' %}{% endif %}{{ bos_token }}" + before
        + "{% for m in messages %}"
        "{% set later = messages[loop.index0:] | rejectattr('role', 'equalto', 'user') | list %}"
        f"{{% if m.role == 'user' %}}{{{{ '{start}' + ({system}) if loop.first or loop.previtem.role != 'user' "
        f"else '\n\n' }}}}{{{{ m.content }}}}{{{{ '{end}' if {after} else '' }}}}{{% else %}}"
        f"{{{{ '{gap}' + m.content + eos_token }}}}{{% endif %}}{{% endfor %}}"
    )  # fmt: skip


def with_tools(template: str) -> str:
    """Template of Mistral with tools: offered before the last message, called, answered."""
    offer = "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and not after else '' }}"
    offer = "{% set after = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}" + offer
    call = "(call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}'"
    calls = f"[TOOL_CALLS][{{% for call in m.tool_calls %}}{{{{ {call} }}}}{{% endfor %}}]{{{{ eos_token }}}}"
    answer = '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    first = f"{{% if m.tool_calls %}}{calls}{{% elif m.role == 'tool' %}}{answer}{{% elif m.role == 'user' %}}"
    return template.replace(
        "{% if m.role == 'user' %}", offer.join(["{% if m.role == 'user' %}", "{% endif %}"]) + first
    )


LLAMA = ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
DATED = (
    FIRST_SYSTEM
    + "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: '"
    " + date_string + '\n\n' + system + '<|eot_id|>' }}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)
GEMMA = ("<start_of_turn>", "\n", "<end_of_turn>\n")
PREFIXED = "(system + '\n\n' if loop.first and system else '') + m.content | trim"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
THINKING = {
    "content": f"({NO_THOUGHTS} if m.role == 'assistant' and loop.last else '') + m.content",
    "opened": f"('' if enable_thinking | default(true) else {NO_THOUGHTS})",
}


@dataclass(frozen=True)
class ChatFamily:
    """Template and special tokens of a family."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None

    def tokenizer(self, *more: str) -> PreTrainedTokenizerFast:
        """Return a tokenizer of bytes with the special tokens, and `more` of them; it writes the start token."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[attr-defined]
        inner.decoder = decoders.ByteLevel()  # type: ignore[attr-defined]
        inner.add_special_tokens([*self.special, *more])
        if self.bos:
            pairs = [(self.bos, inner.token_to_id(self.bos))]
            inner.post_processor = processors.TemplateProcessing(single=f"{self.bos} $A", special_tokens=pairs)  # type: ignore[attr-defined]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=self.eos, bos_token=self.bos)
        tokenizer.chat_template = self.template
        return tokenizer

    def policy(self, *more: str) -> CausalLMPolicy:
        """Return a policy of random weights; every special token of the tokenizer that may end a text does."""
        model = tiny_model(vocab_size=320, max_position_embeddings=512, eos_token_id=None, pad_token_id=None)
        assert isinstance(model, Qwen3ForCausalLM)
        tokenizer = self.tokenizer(*more)
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|endoftext|>", self.eos])  # type: ignore[union-attr]
        return CausalLMPolicy(model, tokenizer)


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_TOKENS = (
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>", "<|begin_of_text|>",
)  # fmt: skip
GEMMA_TOKENS = (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>")
PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
MISTRAL = (("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]"), "</s>", "<s>")
V7_SYSTEM = "{{ '[SYSTEM_PROMPT] ' + system | trim + '[/SYSTEM_PROMPT]' if system else '' }}"
IM = ("<|im_start|>", "\n", "<|im_end|>\n")
FAMILIES = {
    "Qwen2.5-Instruct": ChatFamily(by_role(*IM, before=DEFAULT_SYSTEM), QWEN, "<|im_end|>"),
    "Qwen3": ChatFamily(by_role(*IM, **THINKING), QWEN, "<|im_end|>"),
    "Qwen3-Instruct-2507": ChatFamily(by_role(*IM), QWEN, "<|im_end|>"),
    "Llama 3": ChatFamily(by_role(*LLAMA, content="m.content | trim"), *LLAMA_TOKENS),
    "Llama 3.1": ChatFamily(by_role(*LLAMA, content="m.content | trim", before=DATED), *LLAMA_TOKENS),
    "Llama 3.2": ChatFamily(by_role(*LLAMA, content="m.content | trim", before=DATED), *LLAMA_TOKENS),
    "Gemma 1 and 2": ChatFamily(
        by_role(*GEMMA, content="m.content | trim", assistant="model", before=NO_SYSTEM, check=ALTERNATE),
        *GEMMA_TOKENS,
    ),
    "Gemma 3": ChatFamily(
        by_role(*GEMMA, content=PREFIXED, assistant="model", before=FIRST_SYSTEM, check=ALTERNATE),
        *GEMMA_TOKENS,
    ),
    "Phi-3": ChatFamily(by_role("<|", "|>\n", "<|end|>\n", closed="eos_token"), PHI, "<|endoftext|>"),
    "Phi-3.5": ChatFamily(by_role("<|", "|>\n", "<|end|>\n", closed="eos_token"), PHI, "<|endoftext|>"),
    "Phi-4": ChatFamily(
        by_role("<|im_start|>", "<|im_sep|>", "<|im_end|>"), (*QWEN, "<|im_sep|>"), "<|im_end|>"
    ),
    "Phi-4-mini-instruct (without tools)": ChatFamily(
        by_role("<|", "|>", "<|end|>", closed="eos_token"), PHI, "<|endoftext|>"
    ),
    "Mistral-7B-Instruct v0.1 (v1)": ChatFamily(
        by_instruction(" [INST] ", " [/INST]", " ", "system if loop.first else ''"), *MISTRAL
    ),
    "Mistral-7B-Instruct v0.3 (v3)": ChatFamily(by_instruction("[INST] ", "[/INST]", " "), *MISTRAL),
    "Mistral-Nemo (v3, tekken)": ChatFamily(with_tools(by_instruction("[INST]", "[/INST]", "")), *MISTRAL),
    "Mistral-Large 2411 (v7)": ChatFamily(by_instruction("[INST] ", "[/INST]", " ", "''", V7_SYSTEM), *MISTRAL),
}  # fmt: skip
