# SPDX-License-Identifier: Apache-2.0
"""The chat client against a real server on a local port: answers in order, every failure its own row."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from tests.support.servers.chat import chat, sent_images, serving, words
from visalign.remote import ServerConnection, ServerError
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import FailureAlarm
from visalign.rewards.chat.messages import Reply, read_reply, safe_text
from visalign.rewards.chat.server import ChatServer
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template, question

SHOW = question("show", "What of {prompt}?")


def images(count: int, side: int = 6) -> torch.Tensor:
    levels = torch.randint(0, 256, (count, 3, side, side + 2), generator=torch.Generator().manual_seed(0))
    return levels.float() / 255


def asks(*prompts: str) -> list[Query]:
    return [Query(images=[image], prompt=prompt) for image, prompt in zip(images(len(prompts)), prompts, strict=True)]


def client(url: str, **options) -> ChatServer:
    defaults = {"retries": 0, "backoff": 0.01, "timeout": 5.0, "max_failure_rate": 1.0}
    return ChatServer(url, "tiny", **{**defaults, **options})


def texts(server: ChatServer, *prompts: str, **options) -> list:
    return [row[0] for row in server.ask(SHOW, asks(*prompts), read=lambda reply: reply.text, **options)]


def test_answers_come_in_the_order_of_the_questions():
    def answer(body):
        time.sleep(0.02 * (4 - int(words(body)[-2])))  # the first asked are the last to answer
        return chat(words(body))

    with serving(answer) as stub:
        answers = texts(client(stub.url), *(f"p{number}" for number in range(4)))
    assert answers == [f"What of p{number}?" for number in range(4)]
    assert stub.paths == ["/v1/chat/completions"] * 4


def test_images_are_sent_without_loss_and_equal_requests_once():
    with serving(lambda body: chat("yes")) as stub:
        server = client(stub.url)
        image = images(1)[0]
        repeated = [Query(images=[image], prompt="a"), Query(images=[image.clone()], prompt="a")]
        answers = server.ask(SHOW, [*repeated, Query(images=[1 - image], prompt="a")], read=lambda reply: reply.text)
    assert answers == [["yes"]] * 3
    assert len(stub.asked) == 2
    sent = sorted((sent_images(body)[0] for body in stub.asked), key=lambda levels: int(levels[0, 0, 0]))
    levels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert any((pixels == levels).all() for pixels in sent) and any((pixels == 255 - levels).all() for pixels in sent)


def test_the_body_overrides_the_servers_own_sampling_defaults():
    with serving(lambda body: chat("x")) as stub:
        options = {"temperature": 0.7, "max_new_tokens": 9, "seed": 5, "answers": 2}
        server = client(stub.url, extra={"min_p": None, "guided": 1})
        server.ask(SHOW, asks("a"), read=lambda reply: reply, **options)
        client(stub.url, dialect="openai", token_field="max_completion_tokens").ask(
            SHOW, asks("b"), read=lambda reply: reply
        )
    first, second, third = sorted(stub.asked, key=lambda body: (words(body), body["seed"]))
    assert (first["seed"], second["seed"]) == (5, 6)
    assert first["temperature"] == 0.7 and first["max_tokens"] == 9 and first["n"] == 1 and first["top_p"] == 1
    assert first["repetition_penalty"] == 1 and first["top_k"] == -1 and first["guided"] == 1
    assert "min_p" not in first and first["stream"] is False and first["model"] == "tiny"
    assert third["max_completion_tokens"] == 1024 and not {"top_k", "max_tokens", "min_p"} & set(third)


def test_braces_and_control_tokens_of_a_prompt_are_text():
    with serving(lambda body: chat("x")) as stub:
        texts(client(stub.url), "{prompt} {0} <|im_end|><image> ünï {")
    assert words(stub.asked[0]) == "What of {prompt} {0} < |im_end|>< image> ünï {?"
    assert safe_text("<<|a|>|a|>") == "<< |a|>|a|>"
    assert safe_text("a < b > c") == "a < b > c"


FAILURES = {
    "hang": ("!hang", "silent for 1.5 s"),
    "drip": ("!drip", "had not answered after 2.5 s"),
    "close": ("!close", "connection broke off"),
    "reset": ("!reset", "connection broke off"),
    "500": ((500, {"error": {"message": "out of memory"}}, {}), "500 .*out of memory"),
    "429": ((429, {"error": {"message": "slow down"}}, {}), "429 .*slow down"),
    "400": ((400, {"object": "error", "message": "longer than the context"}, {}), "400 .*longer than the context"),
    "text": ("<html>", "did not answer with a JSON object"),
    "choices": ({"choices": []}, "no choices with a message"),
    "null": (chat(None), "wrote nothing"),
    "empty": (chat("  "), "wrote nothing"),
    "length": (chat("The pic", finish="length"), "cut off at the token limit"),
    "filter": (chat("x", finish="content_filter"), "content filter"),
    "refusal": (
        {"choices": [{"message": {"content": None, "refusal": "No people."}, "finish_reason": "stop"}]},
        "the judge refused: No people.",
    ),
}


def test_every_failure_costs_only_its_own_row():
    def answer(body):
        name = words(body).removeprefix("What of ").removesuffix("?")
        return FAILURES[name][0] if name in FAILURES else chat(name)

    names = [name for failure in FAILURES for name in (failure, f"good {failure}")]
    with serving(answer) as stub:
        started = time.monotonic()
        answers = texts(client(stub.url, timeout=1.5, deadline=2.5, parallel=8), *names)
        assert time.monotonic() - started < 30
    for name, outcome in zip(names, answers, strict=True):
        if name in FAILURES:
            assert isinstance(outcome, AnswerError), name
            with pytest.raises(AnswerError, match=FAILURES[name][1]):
                raise outcome
        else:
            assert outcome == name


def test_only_transient_failures_are_retried():
    attempts: dict[str, int] = {}

    def answer(body):
        name = words(body)[8:-1]
        attempts[name] = attempts.get(name, 0) + 1
        if attempts[name] > 2:
            return chat("at last")
        return {"busy": (503, "", {}), "limit": (429, "", {"Retry-After": "0"}), "shut": "!close"}.get(
            name, (400, "", {})
        )

    with serving(answer) as stub:
        answers = texts(client(stub.url, retries=2), "busy", "limit", "shut", "wrong")
    assert answers[:3] == ["at last"] * 3 and isinstance(answers[3], AnswerError)
    assert attempts == {"busy": 3, "limit": 3, "shut": 3, "wrong": 1}


def test_pauses_double_and_differ(monkeypatch):
    pauses: list[float] = []

    async def noted(pause: float) -> None:
        pauses.append(pause)

    monkeypatch.setattr("visalign.remote.asyncio.sleep", noted)
    with pytest.raises(ServerError, match="failed 4 times"):
        ServerConnection("http://127.0.0.1:9", retries=3).get("models")
    assert all(full / 2 <= pause <= full for pause, full in zip(pauses, (1, 2, 4), strict=True))
    assert pauses[1] != 2 * pauses[0]


def test_a_notebook_with_a_running_event_loop_can_ask():
    async def inside():
        return texts(client(stub.url), "a", "b")

    with serving(lambda body: chat(words(body))) as stub:
        assert asyncio.run(inside()) == ["What of a?", "What of b?"]


@pytest.mark.parametrize(("status", "option"), [(401, "api_key"), (404, "model")])
def test_a_fatal_status_ends_the_call(status, option):
    with serving(lambda body: (status, "no", {})) as stub:
        with pytest.raises(RewardError, match=f"tiny: .*answered {status}.*{option}"):
            texts(client(stub.url, parallel=1), *(f"p{number}" for number in range(60)))
    assert len(stub.asked) < 60


def test_a_broken_judge_raises_the_alarm_before_all_is_asked():
    with serving(lambda body: chat("x", finish="length")) as stub:
        server = client(stub.url, max_failure_rate=0.5, parallel=1)
        with pytest.raises(RewardError, match=r"8 of 8 answers failed.* 8 × the judge's answer was cut"):
            texts(server, *(f"p{number}" for number in range(100)))
    assert len(stub.asked) < 100


def test_the_alarm_counts_a_window():
    alarm = FailureAlarm("judge", 0.5, window=4, min_samples=2)
    for reason in (None, "a", None, "b", None, "c"):
        alarm.note(reason)
    assert alarm.rate == 0.5
    with pytest.raises(RewardError, match=r"judge: 3 of 4 .*: 1 × b; 1 × c; 1 × d"):
        alarm.note("d")


def test_an_unreadable_answer_is_a_failure_and_a_refusal_is_named():
    def read(reply: Reply) -> str:
        raise AnswerError("no number")

    with serving(lambda body: chat("I'm sorry, but I can't rate it." if "sad" in words(body) else "hm")) as stub:
        answers = client(stub.url).ask(SHOW, asks("sad", "odd"), read=read)
    assert str(answers[0][0]) == "the judge refused: I'm sorry, but I can't rate it."
    assert str(answers[1][0]) == "no number"


def test_an_answer_prefix_is_continued():
    begun = Template(name="begun", messages=SHOW.messages, answer_prefix="<answer>", chat={"enable_thinking": False})
    with serving(lambda body: chat("3")) as stub:
        client(stub.url).ask(begun, asks("a"), read=lambda reply: reply)
        with pytest.raises(RewardError, match=r"'begun' has an answer_prefix, which OpenAI's API lacks"):
            client(stub.url, dialect="openai").ask(begun, asks("a"), read=lambda reply: reply)
    body = stub.asked[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "<answer>"}
    assert body["continue_final_message"] and not body["add_generation_prompt"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(lambda body: (500, "no", {})) as stub:
        answers = texts(client(stub.url, api_key_env="JUDGE_KEY"), "a")
    assert stub.keys == ["Bearer secret"]
    assert "secret" not in str(answers[0])
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RewardError, match="api_key_env is 'JUDGE_KEY', and there is no such variable"):
        client(stub.url, api_key_env="JUDGE_KEY")


def test_probabilities_of_equal_spellings_are_added():
    top = [{"token": "yes", "logprob": -1.0}, {"token": "yes", "logprob": -1.0}, {"token": "no", "logprob": -2.0}]
    sent = chat("yes", finish="length")
    sent["choices"][0]["logprobs"] = {"content": [{"token": "yes", "top_logprobs": top}]}
    log_probs = read_reply(sent, first_token_only=True).first_token
    assert log_probs["yes"] == pytest.approx(-1 + torch.tensor(2.0).log().item()) and log_probs["no"] == -2


def test_content_in_parts():
    sent = chat(None)
    sent["choices"][0]["message"]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_reply(sent).text == "ab"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dialect": "tgi"}, "dialect is 'tgi'; allowed are vllm"),
        ({"base_url": "localhost:8000"}, "base_url localhost://"),
        ({"max_failure_rate": -1}, "max_failure_rate is -1"),
    ],
)
def test_options_refused(options, message):
    with pytest.raises((RewardError, ValueError), match=message):
        ChatServer(**{"base_url": "http://localhost:1", "model": "tiny", **options})
