# SPDX-License-Identifier: Apache-2.0
"""Rewards for the form of a completion: tags, a regular expression, or JSON with a schema."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from visalign.rewards.base.contract import RewardError, check_choices

from .contract import TextRule, TextVerdict, shortened
from .parsing import fenced_blocks


class TextFormat(TextRule):
    """1 for a completion of the required form, else 0; the remark says what is wrong.

    With `tags`: each <tag>…</tag> occurs exactly once, in this order, not nested and not empty, with nothing
    but white space around. With `pattern`: the regular expression matches the whole text.
    """

    unit = "1 = right form"

    def __init__(
        self,
        *,
        tags: Sequence[str] | None = None,
        pattern: str | None = None,
        prefilled: str = "",
        name: str = "text_format",
    ) -> None:
        """Choose the form.

        Args:
            tags: names in order; ("think", "answer") when neither tags nor pattern are given.
            pattern: regular expression for the stripped text; "." matches line ends too.
            prefilled: start of the completion that the chat template wrote ("<think>" for some models); put
                in front before the check.
            name: for messages and logs.
        """
        if tags is not None and pattern is not None:
            raise ValueError(f"{name}: give tags or pattern, not both.")
        self.name = name
        self._prefilled = prefilled
        self._pattern = _regular_expression(name, pattern)
        self._tags = list(tags if tags is not None else ("think", "answer"))
        if not self._tags or len(set(self._tags)) < len(self._tags):
            raise ValueError(f"{name}: tags are {self._tags}; give at least one, each once.")
        for tag in self._tags:
            if not re.fullmatch(r"[\w-]+", tag):
                raise ValueError(f"{name}: {tag!r} is no name of a tag; give it without < and >.")
        self._any_tag = re.compile(f"<(/?)({'|'.join(map(re.escape, self._tags))})>")

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Check the form; the record is ignored."""
        return _pass_or_fail(self._problem(self._prefilled + completion))

    def _problem(self, text: str) -> str | None:
        if self._pattern is not None:
            return None if self._pattern.fullmatch(text.strip()) else "the pattern does not match"
        matches = list(self._any_tag.finditer(text))
        tags = [(match[1], match[2]) for match in matches]
        expected = [(slash, tag) for tag in self._tags for slash in ("", "/")]
        for slash, tag in expected:
            if (count := tags.count((slash, tag))) != 1:
                return f"<{slash}{tag}> occurs {count} times, needed is once"
        if tags != expected:
            return "the tags are out of order"
        # text between the tags: outside, inside, outside, inside, ..., outside
        edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
        parts = [text[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True)]
        if not all(parts[1::2]):
            return "a tag is empty"
        stray = next(filter(None, parts[::2]), None)
        return None if stray is None else f"text outside the tags: {shortened(stray)}"


class JsonFormat(TextRule):
    """1 for a completion that is JSON and meets the schema, else 0.

    JSON as in RFC 8259: NaN, Infinity and repeated keys in one object are refused.
    """

    unit = "1 = right form"

    def __init__(
        self,
        *,
        schema: Mapping[str, Any] | None = None,
        schema_field: str | None = None,
        where: str = "whole",
        name: str = "json_format",
    ) -> None:
        """Choose the schema.

        Args:
            schema: a JSON schema for all samples; None only parses. Needs the package jsonschema.
            schema_field: metadata field with the sample's own schema.
            where: "whole" (the stripped completion) or "fence" (its only fenced block that is
                marked json, or not marked).
            name: for messages and logs.
        """
        if schema is not None and schema_field is not None:
            raise ValueError(f"{name}: give schema or schema_field, not both.")
        check_choices(name, where=(where, ("whole", "fence")))
        self.name = name
        self._field, self._where = schema_field, where
        if schema is not None or schema_field is not None:
            _need_jsonschema(name)
        self._check = None
        if schema is not None:
            try:
                self._check = self._checker(schema)
            except ValueError as error:
                raise ValueError(f"{name}: the schema is not valid: {error}.") from error

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Check form and schema; a sample that lacks its schema is invalid."""
        check = self._check
        if self._field is not None:
            schema = record.get(self._field)
            if schema is None:
                return TextVerdict(reason=f"its metadata has no {self._field!r}")
            try:
                check = self._checker(schema)
            except ValueError as error:
                return TextVerdict(reason=f"the schema in {self._field!r} is not valid: {error}")
        text = completion
        if self._where == "fence":
            blocks = [block for language, block in fenced_blocks(completion) if language in ("json", "")]
            if len(blocks) != 1:
                return TextVerdict(value=0.0, remark=f"{len(blocks)} fenced blocks, needed is one")
            text = blocks[0]
        try:
            value = read_json(text)
        except (ValueError, RecursionError) as error:
            return TextVerdict(value=0.0, remark=f"no JSON: {error}"[:200])
        return _pass_or_fail(None if check is None else check(value))

    def _checker(self, schema: Any) -> Callable[[Any], str | None]:
        """Build a function that says what is wrong with a value; remote references are not fetched."""
        jsonschema, referencing = (importlib.import_module(part) for part in ("jsonschema", "referencing"))
        if not isinstance(schema, Mapping):
            raise ValueError(f"it is a {type(schema).__name__}, needed is a mapping")
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.exceptions.SchemaError as error:
            raise ValueError(error.message) from error
        validator = kind(schema, registry=referencing.Registry())

        def check(value: Any) -> str | None:
            try:
                error = jsonschema.exceptions.best_match(validator.iter_errors(value))
            except referencing.exceptions.Unresolvable as problem:
                raise RewardError(
                    f"{self.name}: the schema refers to {problem.ref!r}, which is not in it, and nothing is "
                    "fetched. Put the part under $defs."
                ) from problem
            except RecursionError:
                return "it nests too deep"
            return None if error is None else f"{error.json_path}: {error.message}"[:200]

        return check


def read_json(text: str) -> Any:
    """Parse strict JSON: NaN, Infinity and repeated keys raise ValueError."""

    def constant(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key is repeated")
        return dict(pairs)

    return json.loads(text, parse_constant=constant, object_pairs_hook=unique)


def _pass_or_fail(problem: str | None) -> TextVerdict:
    return TextVerdict(value=float(problem is None), remark=problem or "")


def _regular_expression(name: str, pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{name}: pattern {pattern!r} is no regular expression ({error}).") from error


def _need_jsonschema(name: str) -> None:
    if importlib.util.find_spec("jsonschema") is None:
        raise RewardError(
            f"{name}: checking a schema needs the package jsonschema, which is not installed: "
            "python -m pip install jsonschema. Without schema and schema_field JSON is only parsed."
        )
