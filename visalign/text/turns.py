# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns in the form of the chat template: the policy calls tools or acts in an environment.

A turn ends with the template's end token. Tools and environment then write the next messages, whose tokens were not
drawn, and the policy goes on.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visalign.errors import CaughtError, UserError, describe_error, excerpt
from visalign.interfaces import Prompt

from .tool_calls import ToolFailure, run_all, without_surrogates

if TYPE_CHECKING:
    from .chat import PromptEncoder  # it needs jinja2, which the core does without

_CALLED, _KEY, _SAID = "QQNAMEQQ", "QQKEYQQ", "QQTURNQQ"
"""Texts whose places in a rendered conversation are those of a call's name, its argument and a turn."""
OWN_METHODS = ("reset", "step", "get_reward")  # Methods of an environment that are no tools


@dataclass(frozen=True, kw_only=True)
class EnvironmentUse:
    """Tools and environment of a conversation, and its limits."""

    name: str  # Name in messages
    factory: Callable[[], Any] | None = None
    """Makes an environment: `reset(**record)`, and either `step(text)` or methods that are tools, as in TRL."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions with type hints and a docstring with "Args:", from which the template describes them."""
    max_turns: int = 8  # Turns of the policy; behind the last one nothing is answered
    max_answer_tokens: int = 256  # Tokens of an answer; a longer one is cut
    seconds: float = 30.0  # Time limit of a turn's tools, or of a step


@dataclass
class Conversation:
    """State of one sample."""

    environment: Any
    tools: Mapping[str, Callable[..., Any]]
    turns: int = 0
    calls: int = 0  # Those of a tool that is there, with arguments that it takes
    reward: float | None = None
    """Sum of the rewards of steps so far; at the end that of `get_reward`, where there is one."""


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the public methods of an environment, its tools; none of one with `step`."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name[0] != "_"]
    if "step" in names:
        return []
    return [getattr(environment, name) for name in names if name not in OWN_METHODS]


class ChatTurns:
    """Runs the conversations of a batch; `reset` of an environment gets the fields of a prompt's record by name."""

    def __init__(self, encoder: PromptEncoder, use: EnvironmentUse, records: Sequence[Mapping[str, Any]] = ()) -> None:
        self.encoder, self.use = encoder, use
        self._records = {_key(record["prompt"]): record for record in records}
        self.max_answer_tokens = use.max_answer_tokens
        self._pool = [] if use.factory is None else [self._make(use.factory)]
        tools = [*use.tools, *(tool_methods(self._pool[0]) if self._pool else [])]
        encoder.use_tools(tools)
        self._marker, self._form = _call_form(encoder) if tools else ("", None)
        self._pieces([{"role": "tool", "name": "tool", "content": ""}] if tools else [{"role": "user", "content": ""}])

    def begin(self, prompts: Sequence[Prompt]) -> tuple[list[Conversation], list[Prompt | ToolFailure]]:
        """Reset an environment for each of B prompts; return the prompts with what `reset` said behind them."""
        factory = self.use.factory
        if factory is None:
            tools = {function.__name__: function for function in self.use.tools}
            return [Conversation(None, tools) for _ in prompts], list(prompts)
        while len(self._pool) < len(prompts):
            self._pool.append(self._make(factory))
        started: list[Conversation] = []
        for environment in self._pool[: len(prompts)]:
            functions = [*self.use.tools, *tool_methods(environment)]
            started.append(Conversation(environment, {function.__name__: function for function in functions}))
        jobs = [lambda pair=pair: self._reset(*pair) for pair in zip(started, prompts, strict=True)]
        return started, run_all(jobs, self.use.seconds, f"{self.use.name}.reset")

    def _make(self, factory: Callable[[], Any]) -> Any:
        with CaughtError() as caught:
            return factory()
        assert caught.error is not None
        raise UserError(f"{self.use.name} raised {describe_error(caught.error)}. It is called without arguments.")

    def _reset(self, conversation: Conversation, prompt: Prompt) -> Prompt:
        record, reset = self._records.get(_key(prompt), {"prompt": prompt}), conversation.environment.reset
        parameters = inspect.signature(reset).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        text = reset(**{name: value for name, value in record.items() if takes_all or name in parameters})
        if text is None:
            return prompt
        if isinstance(prompt, str):
            return prompt + str(text)
        *earlier, last = prompt
        content = last["content"]
        joined = content + str(text) if isinstance(content, str) else [*content, {"type": "text", "text": str(text)}]
        return [*earlier, {**last, "content": joined}]

    def answer(self, conversations: Sequence[Conversation], texts: Sequence[str]) -> list[Any]:
        """Answer a turn of each conversation: lists of (text, whether the template wrote it), None at its end."""
        pairs = zip(conversations, texts, strict=True)
        answers = run_all([lambda pair=pair: self._messages(*pair) for pair in pairs], self.use.seconds, self.use.name)
        return [self._pieces(answer) if isinstance(answer, list) else answer for answer in answers]

    def _messages(self, conversation: Conversation, text: str) -> list[dict[str, Any]] | None:
        """Return the messages behind a turn, None where the conversation ends."""
        conversation.turns += 1
        last, environment = conversation.turns >= self.use.max_turns, conversation.environment
        calls = self._calls(text) if conversation.tools and not last else []
        if calls:
            return [self._call(conversation, call) for call in calls]
        if environment is None or not hasattr(type(environment), "step"):
            return None
        observation, reward, done = _step_result(environment.step(text))
        if reward is not None:
            conversation.reward = (conversation.reward or 0.0) + float(reward)
        return None if done or last or observation is None else [{"role": "user", "content": str(observation)}]

    def _calls(self, text: str) -> list[Any]:
        """Read the calls of a turn; one that is no JSON stays a text."""
        if self._form is None:
            parsed = self.encoder.tokenizer.parse_response(text)
            return [call.get("function", call) for call in parsed.get("tool_calls") or []]
        text = text.rpartition("</think>")[2]
        pieces = text.split(self._marker)[1:] if self._marker else [text] * text.lstrip().startswith("{")
        calls, decoder = list[Any](), json.JSONDecoder()
        for piece in pieces:
            more = True
            while more:  # a list of calls behind one mark, as Mistral has them
                try:
                    call, end = decoder.raw_decode(piece, max(0, piece.find("{")))
                except ValueError:
                    call, end = piece, len(piece)
                calls.append(call.get("function", call) if isinstance(call, dict) else call)
                piece = piece[end:].lstrip()
                more = piece.startswith(",")
        return calls

    def _call(self, conversation: Conversation, call: Any) -> dict[str, Any]:
        """Call a tool; what the policy did wrong is the answer, what the tool raises is not caught."""
        name = str(call.get("name")) if isinstance(call, Mapping) else ""
        answer = {"role": "tool", "name": name, "tool_call_id": "call00000"}
        if name not in conversation.tools:
            problem = f"no tool {name!r}" if name else f"no call {excerpt(call)}"
            return {**answer, "content": f"error: {problem}; the tools are {', '.join(conversation.tools)}"}
        arguments, tool = call.get(self._form or "arguments") or {}, conversation.tools[name]
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            inspect.signature(tool).bind(**arguments)
            _check_types(tool, arguments)
        except (TypeError, ValueError) as error:
            return {**answer, "content": f"error: {error}"}
        result = tool(**arguments)
        conversation.calls += 1
        text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        return {**answer, "content": text}

    def finish(self, conversations: Sequence[Conversation]) -> list[float | ToolFailure | None]:
        """Return the rewards of the environments, None where one gives none."""
        jobs = [lambda conversation=conversation: self._outcome(conversation) for conversation in conversations]
        return run_all(jobs, self.use.seconds, f"{self.use.name}.get_reward")

    def discard(self, conversations: Sequence[Conversation]) -> None:
        """Use the environments of failed conversations no more; a hanging one may still be at work."""
        failed = {id(conversation.environment) for conversation in conversations}
        self._pool = [environment for environment in self._pool if id(environment) not in failed]

    def _outcome(self, conversation: Conversation) -> float | None:
        if hasattr(type(conversation.environment), "get_reward"):
            conversation.reward = conversation.environment.get_reward()
        if conversation.reward is None and not conversation.turns:
            return 0.0  # its first turn was cut, so that nothing was stepped
        return None if conversation.reward is None else float(conversation.reward)

    def _pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """Split what the template writes behind a turn into (text, whether it is the template's)."""
        markers = [f"QQ{number}ANSWERQQ" for number in range(len(messages))]
        behind = [{**message, "content": marker} for message, marker in zip(messages, markers, strict=True)]
        opened = [{"role": "user", "content": _KEY}, {"role": "assistant", "content": _SAID}]
        text = self.encoder.render([*opened, *behind]).rpartition(_SAID)[2]
        if any(marker not in text for marker in markers):
            raise UserError(
                f"{self.use.name}: the chat template of this model has no place for messages of the role "
                f"{messages[0]['role']!r}. Take a model that was trained with tools."
            )
        end = self.encoder.turn_end()
        mark = "" if end is None else self.encoder.tokenizer.decode([end])
        text = text[text.find(mark) + len(mark) :] if mark and mark in text.partition(markers[0])[0] else text
        contents = dict(zip(markers, (without_surrogates(message["content"]) for message in messages), strict=True))
        parts = re.split(f"({'|'.join(markers)})", text)
        return [(contents.get(part, part), part not in contents) for part in parts if part]


def _check_types(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse an argument whose type differs from its hint; a default may always be written out."""
    hints, parameters = typing.get_type_hints(tool), inspect.signature(tool).parameters
    for name in arguments.keys() & hints.keys() & parameters.keys():
        value, hint = arguments[name], hints[name]
        if value is not parameters[name].default and not _has_type(value, hint):
            needed = hint.__name__ if isinstance(hint, type) else hint
            raise TypeError(f"argument {name!r} is {excerpt(value)}; needed is {needed}")


def _has_type(value: Any, hint: Any) -> bool:
    """Compare a JSON value with a hint; hints that JSON has no type for take any value."""
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        return any(_has_type(value, option) for option in typing.get_args(hint))
    if kind not in (str, int, float, bool, list, dict, types.NoneType):
        return True
    return type(value) is kind or (kind is float and type(value) is int)


def _call_form(encoder: PromptEncoder) -> tuple[str, str | None]:
    """Return the mark before the calls of a turn and the key of their arguments; None where they are no JSON."""
    call = {"type": "function", "id": "call00000", "function": {"name": _CALLED, "arguments": {_KEY: _KEY}}}
    call_messages = {"role": "user", "content": _SAID}, {"role": "assistant", "content": "", "tool_calls": [call]}
    text = encoder.render(call_messages, closed=True).rpartition(_SAID)[2]
    for begin in (match.start() for match in re.finditer("{", text)):
        try:
            call_object, _ = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            continue
        call_object = call_object.get("function", call_object)
        if isinstance(call_object, Mapping) and call_object.get("name") == _CALLED:
            key = next(name for name, value in call_object.items() if _KEY in str(value))
            words = text[:begin].rpartition(encoder.role or text[:1])[2].rstrip("[ \n").split()
            return (words[-1] if words else ""), key
    if getattr(encoder.tokenizer, "response_template", None) is None:
        raise UserError(
            f"The chat template writes calls of tools as {excerpt(text)}, which is no JSON, and the tokenizer has no "
            "response_template, by which transformers would read them. Take another model, or rollout.tool."
        )
    return "", None


def _step_result(result: Any) -> tuple[Any, Any, bool]:
    """Read what `step` returned: an observation, or (observation, reward, done, ...) as in Gymnasium."""
    if not isinstance(result, tuple):
        return result, None, result is None
    if len(result) not in (2, 3, 4, 5):
        raise ValueError(f"step returned {len(result)} values; return a text, or (observation, reward, done)")
    observation, reward, *rest = result
    return observation, reward, any(bool(flag) for flag in rest if not isinstance(flag, Mapping))


def _key(prompt: Prompt) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)
