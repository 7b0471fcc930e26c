# SPDX-License-Identifier: Apache-2.0
"""Generation by a server: a real one on a local port that draws what the policy draws, and its failures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.models.language import tiny_model, tiny_tokenizer
from tests.support.servers.completions import TinyServer, serving
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.adapters.server.completions import CompletionRequest, check_processed, find_end
from visalign.adapters.server.generator import ServerGenerator
from visalign.errors import UserError
from visalign.remote import ServerError
from visalign.text import Sampling, StoppingCriteria, TextRollout

PROMPTS = ["a", "hello there you", [{"role": "user", "content": "hi"}], "1+2="]
EVERY = StoppingCriteria(max_new_tokens=14, strings=("b", "7"))
RAW = [Sampling(), Sampling(temperature=0)]
PROCESSED = [Sampling(temperature=0.7), Sampling(top_k=8, top_p=0.6)]


def tiny_policy(**options: Any) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(), tiny_tokenizer(), **options)


@pytest.fixture(scope="module")
def policy() -> CausalLMPolicy:
    """In training; the server has its own copy of the weights."""
    return tiny_policy()


@pytest.fixture(scope="module")
def running() -> Iterator[TinyServer]:
    with serving(tiny_policy()) as server:
        yield server


@pytest.fixture
def server(running) -> TinyServer:
    """As it behaves by default."""
    running.closing.set()
    fresh = TinyServer(running.policy)
    for name, value in vars(fresh).items():
        if name not in ("url", "_lock"):
            setattr(running, name, value)
    return running


def generator(policy, server, **options: Any) -> ServerGenerator:
    return ServerGenerator(policy, server.url, "tiny", **{"backoff": 0.01, **options})


@torch.no_grad()
def gap(rollout: TextRollout, policy: CausalLMPolicy) -> float:
    """Largest |log π − log μ| of a rollout's tokens."""
    gaps = (policy.log_probs(rollout).log_prob - rollout.log_prob) * rollout.loss_mask
    return float(gaps.abs().max())


def drawn(source, sampling=RAW[0], stopping=EVERY, prompts=PROMPTS, **options: Any) -> TextRollout:
    return source.generate(
        prompts, **{"seeds": 4, "num_generations": 3, "sampling": sampling, "stopping": stopping, **options}
    )


@pytest.mark.parametrize(
    ("mode", "sampling"), [*(("raw_logprobs", s) for s in RAW), *(("processed_logprobs", s) for s in PROCESSED)]
)
def test_a_servers_completions_are_the_policys_own(policy, server, mode, sampling) -> None:
    server.mode = mode
    rollout = drawn(generator(policy, server, logprobs_mode=mode), sampling)
    own = drawn(policy, sampling)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "loss_mask"):
        mask = 1 if name.startswith("prompt") else own.loss_mask
        torch.testing.assert_close(getattr(rollout, name) * mask, getattr(own, name) * mask, rtol=0, atol=0)
    for name in ("text", "stop_reason", "group", "prompt", "seed", "sampling"):
        assert getattr(rollout, name) == getattr(own, name)
    assert {"eos", "stop string", "length"} >= set(rollout.stop_reason) and len(set(rollout.stop_reason)) > 1
    again = policy.log_probs(rollout)
    torch.testing.assert_close(rollout.log_prob, again.log_prob.detach(), rtol=0, atol=1e-4)
    assert (rollout.log_prob[rollout.loss_mask == 0] == 0).all() and float(rollout.log_prob.min()) < -0.5
    present, missing = ("entropy", "full_log_prob") if sampling.truncates else ("full_log_prob", "entropy")
    torch.testing.assert_close(getattr(rollout, present), getattr(own, present), rtol=0, atol=1e-4)
    assert torch.equal(torch.isnan(getattr(rollout, missing)), rollout.loss_mask > 0)
    if sampling.truncates:
        assert rollout.kept is not None and own.kept is not None
        assert torch.equal(rollout.kept.count, own.kept.count) and torch.equal(rollout.kept.ids, own.kept.ids)
    else:
        assert rollout.kept is None


def test_each_sample_is_a_request_that_leaves_nothing_to_the_servers_defaults(policy, server) -> None:
    drawn(generator(policy, server), prompts=["ab", "c"], num_generations=2, seeds=[9, 8, 7, 6])
    assert sorted((body["seed"], body["prompt"]) for body in server.completions) == [
        (6, policy.prompts.encode(["c"])[0]),
        (7, policy.prompts.encode(["c"])[0]),
        (8, policy.prompts.encode(["ab"])[0]),
        (9, policy.prompts.encode(["ab"])[0]),
    ]
    body = server.completions[0]
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    rules = {"stop": ["b", "7"], "stop_token_ids": [1], "ignore_eos": True, "skip_special_tokens": False}
    drawing = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "n": 1, "max_tokens": 14, "logprobs": 1}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "include_stop_str_in_output": True}
    assert {**neutral, **rules, **drawing, **ids}.items() <= body.items()


def test_the_server_says_its_context(server) -> None:
    server.max_model_len = 20
    policy, prompt = tiny_policy(), "abcdefghijkl"
    stopping = StoppingCriteria(max_new_tokens=30, eos_ids=())
    rollout = drawn(generator(policy, server), prompts=[prompt], stopping=stopping)
    assert rollout.loss_mask.sum(1).tolist() == [8, 8, 8] and server.completions[0]["max_tokens"] == 8
    source = generator(policy, server)
    for prompts in (["a", "b" * 20], ["b" * 20]):
        with pytest.raises(UserError, match=r"has 20 tokens, and at most 19 are allowed .* is 20"):
            drawn(source, prompts=prompts)
    policy.max_prompt_tokens = 5
    with pytest.raises(UserError, match=r"Prompt 0 has 12 tokens, and at most 5 are allowed"):
        drawn(source, prompts=[prompt])
    assert sum(path == "/v1/models" for path, _ in server.asked) == 2, "asked once per generator"


def test_prompts_that_are_too_long_are_masked_where_the_run_should_go_on(server) -> None:
    server.max_model_len = 20
    masked = generator(tiny_policy(long_prompts="mask"), server)
    rollout = drawn(masked, prompts=["a", "b" * 20, "c"])
    assert rollout.stop_reason[3:6] == ["prompt too long"] * 3 and rollout.text[3:6] == [""] * 3
    assert rollout.generated.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert (rollout.loss_mask[3:6] == 0).all() and rollout.prompt_ids.shape[1] == 1
    request_count = len(server.asked)
    nothing = drawn(masked, prompts=["b" * 20], num_generations=1)
    assert not nothing.generated.any() and len(server.asked) == request_count


@pytest.mark.parametrize(
    ("mode", "sampling", "message"),
    [
        ("raw_logprobs", Sampling(temperature=0.7), r"temperature=0\.7.*Start vLLM .*processed_logprobs"),
        ("processed_logprobs", Sampling(top_p=0.9), r"top_p=0\.9 without top_k leaves .*=20\); the ratio"),
        ("processed_logprobs", Sampling(temperature=0.005), r"is 0\.005; vLLM samples with 0\.01 instead"),
    ],
)
def test_sampling_whose_log_probs_the_server_does_not_give_is_refused(policy, server, mode, sampling, message) -> None:
    with pytest.raises(UserError, match=message):
        drawn(generator(policy, server, logprobs_mode=mode), sampling)
    assert server.asked == []


def test_a_server_that_gives_raw_log_probs_is_found_out(policy, server) -> None:
    claimed = generator(policy, server, logprobs_mode="processed_logprobs")
    for sampling in (Sampling(temperature=0.7), Sampling(top_k=5)):
        with pytest.raises(ServerError, match=r"do not follow the temperature .*changes by 1\.00"):
            drawn(claimed, sampling)
    assert server.completions == []
    drawn(claimed, Sampling())  # the two are one here
    server.mode = "processed_logprobs"
    for _ in range(2):
        drawn(claimed, Sampling(temperature=0.7), prompts=["a"], num_generations=1)
    assert sum(body.get("max_tokens") == 1 for _, body in server.asked) == 6, "one probe that agreed"


def test_a_probe_that_cannot_tell_is_asked_again(policy, server) -> None:
    connection = generator(policy, server)._connection
    server.alter = lambda reply: changed(reply, top_logprobs=[{"token_id:5": -1.0, "token_id:6": -1.05}])
    assert not check_processed(connection, "tiny", [5])
    server.alter = lambda reply: changed(reply, top_logprobs=None)
    assert not check_processed(connection, "tiny", [5])


def changed(reply: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A reply with fields of its choice, or of the choice's logprobs, changed."""
    choice = reply["choices"][0]
    for name, value in fields.items():
        section = choice["logprobs"] if name in choice["logprobs"] else choice
        section[name] = value(section[name]) if callable(value) else value
    return reply


BAD = [
    ({"token_ids": None}, r"choices\.0\.token_ids is None\. .*from 0\.10\.2 on"),
    ({"token_ids": [5, 64, 5]}, r"sampled token 64, but the policy has 64"),
    ({"token_logprobs": [-1.0, -1.0, math.nan]}, r"token_logprobs\.2 is nan"),
    ({"token_logprobs": [3.5, -1.0, -1.0]}, r"token_logprobs\.0 is 3\.5.*--logprobs-mode processed_logprobs"),
    ({"finish_reason": "stop"}, r"the server stopped, but its 3 tokens end with \d+, .*\.eos_ids"),
    ({"prompt_token_ids": lambda ids: [0, *ids]}, r"another prompt than it was sent"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_completion_that_cannot_be_trusted_is_refused(policy, server, fields, message) -> None:
    stopping = StoppingCriteria(max_new_tokens=3, eos_ids=())
    server.alter = lambda reply: changed(reply, **fields)
    with pytest.raises(ServerError, match=rf"^{server.url}/completions, sample 0: .*{message}"):
        drawn(generator(policy, server), stopping=stopping, prompts=["a"], num_generations=1)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ([{"a": -0.1}] * 3, r"top_logprobs of token 0 must name tokens by id, .*'a'"),
        ([{"token_id:5": 0.0}] * 3, r"the 1 tokens listed at token 0 have a total probability of 1\.0000"),
        ([{f"token_id:{k}": math.log(0.5 if k == 0 else 0.5 / 63) for k in range(64)}] * 3, None),
        (
            [{f"token_id:{k}": math.log([0.5, 0.3][k] if k < 2 else 0.2 / 62) for k in range(64)}] * 3,
            r"the 64 tokens listed at token 0 .* the 2 that could be sampled, and ties",
        ),
    ],
)
def test_the_tokens_that_could_be_drawn_must_be_known(policy, server, top, message) -> None:
    """All that the server lists adds up to 1, holds what was drawn, and is top_k tokens and ties."""
    server.mode = "processed_logprobs"
    source = generator(policy, server, logprobs_mode=server.mode)
    source._probed = True
    server.alter = lambda reply: changed(reply, top_logprobs=top)
    sampling, stopping = Sampling(top_k=2), StoppingCriteria(max_new_tokens=3, eos_ids=())
    if message is None:  # two that lead and 62 that tie with the second
        token_sets = drawn(source, sampling, stopping, ["a"]).kept
        assert token_sets is not None and token_sets.count.unique().tolist() == [64]
        return
    with pytest.raises(ServerError, match=message):
        drawn(source, sampling, stopping, ["a"], num_generations=1)


@pytest.mark.parametrize(
    ("ids", "finish", "expected"),
    [
        ([5, 6, 1], "stop", (3, "eos")),
        ([5, 1, 6], "length", (2, "eos")),
        ([5, 6, 7, 8], "stop", (3, "stop string")),
        ([6, 7, 1], "stop", (2, "stop string")),
        ([5, 5], "length", (2, "length")),
    ],
)
def test_a_completion_ends_where_stop_says_whatever_came_after(ids, finish, expected) -> None:
    stopping = StoppingCriteria(strings=("bc",))
    common: Any = {"url": "u", "model": "m", "sample": 0, "prompt": [5], "limit": 9, "seed": 0}
    request = CompletionRequest(**common, sampling=RAW[0], stopping=stopping, ends=(1,))
    assert find_end(ids, finish, request, lambda ids: "".join(" <   abcde"[i] for i in ids)) == expected


COMPLAINT = '{"error": {"message": "max_tokens is too large", "code": 400}}'


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (400, COMPLAINT, r"completions answered 400 Bad Request: .*max_tokens is too large"),
        (404, '{"detail": "Not Found"}', r"answered 404 Not Found: .*Not Found.*Check base_url"),
    ],
)
def test_a_refusal_is_final_and_says_what_the_server_said(policy, server, status, text, message) -> None:
    server.failures = [(status, text, {})]
    with pytest.raises(ServerError, match=message) as caught:
        drawn(generator(policy, server), prompts=["a"], num_generations=1)
    assert server.url in str(caught.value) and caught.value.status == status
    assert len(server.completions) == 1


def test_one_failure_gives_up_the_others(policy, server) -> None:
    source = generator(policy, server, parallel=2, timeout=60.0)
    drawn(source, prompts=["a"], num_generations=1)
    server.asked.clear()
    server.failures = [(400, COMPLAINT, {})]
    server.silence = 20.0
    started = time.monotonic()
    with pytest.raises(ServerError, match="max_tokens is too large"):
        drawn(source, num_generations=8)
    assert time.monotonic() - started < 15 and len(server.completions) <= 3
    server.silence = 0.0
    assert drawn(source, prompts=["a"], num_generations=1).generated.all(), "it goes on afterwards"


def test_the_key_is_sent_and_never_shown(policy, server) -> None:
    server.key = "sk-secret"
    drawn(generator(policy, server, api_key="sk-secret"), prompts=["a"], num_generations=1)
    with pytest.raises(ServerError, match=r"answered 401 .*Unauthorized.* api_key") as caught:
        drawn(generator(policy, server, api_key="sk-other"))
    assert "sk-other" not in str(caught.value)
    with pytest.raises(UserError, match=r"api_key contains characters that no") as caught:
        generator(policy, server, api_key="sk-other\n")
    assert "sk-other" not in str(caught.value)


def test_a_model_that_is_not_served(policy, server) -> None:
    source = ServerGenerator(policy, server.url, "tinny")
    with pytest.raises(ServerError, match=r"models lists 'tiny' and not 'tinny'\. Did you mean 'tiny'\?"):
        drawn(source)


@pytest.mark.parametrize("url", ["localhost:8000", "http://me:pw@h/v1"])
def test_what_is_no_address_is_refused_and_hides_its_password(policy, url) -> None:
    with pytest.raises(UserError, match=r"^base_url .* must be the http or https address") as caught:
        ServerGenerator(policy, url, "tiny")
    assert "pw" not in str(caught.value)


def moved(amount: float, tmp_path) -> CausalLMPolicy:
    """A policy whose adapter changes its output, saved."""
    policy = tiny_policy(lora=text_lora(rank=2))
    torch.manual_seed(5)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(amount * torch.randn_like(weight))
    policy.save(tmp_path)
    return policy


def test_an_adapter_is_loaded_under_a_name_of_its_own(tmp_path) -> None:
    first, second = moved(0.1, tmp_path / "one"), moved(0.2, tmp_path / "two")
    with serving(tiny_policy(lora=text_lora(rank=2))) as server:
        source = generator(first, server)
        assert gap(drawn(source), first) > 0.02, "not there yet"
        name = source.sync(tmp_path / "one")
        assert name == source.model and name.startswith("visalign-") and list(server.adapters) == [name]
        rollout = drawn(source)
        assert {body["model"] for body in server.completions[-12:]} == {name}
        assert gap(rollout, first) < 1e-4
        request_count = len(server.asked)
        assert source.sync(tmp_path / "one") == name and len(server.asked) == request_count, "the same bytes"
        other = source.sync(tmp_path / "two")
        assert other != name and list(server.adapters) == [other], "the one before is unloaded"
        assert gap(drawn(source), second) < 1e-4
        # a run that was resumed finds what it loaded before
        assert generator(second, server).sync(tmp_path / "two") == other
        server.adapters.clear()
        assert source.sync(tmp_path / "one") == name, "one that the server forgot needs no unloading"
        assert server.asked[-1] == ("/v1/unload_lora_adapter", {"lora_name": other})


def test_a_whole_model_is_read_anew_from_the_folder_of_the_server(tmp_path) -> None:
    policy = tiny_policy()
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.mul_(1.1)
    with serving(tiny_policy()) as server:
        source = generator(policy, server)
        policy.save(tmp_path)
        with pytest.raises(ServerError, match=r"404 .*VLLM_SERVER_DEV_MODE=1"):
            source.reload(tmp_path)
        assert gap(drawn(source), policy) > 0.01, "not there yet"
        server.folder = tmp_path
        server.failures = [(503, "starting again", {}), (0, "", {})]
        source.reload(tmp_path)
        assert [path for path, _ in server.asked[-2:]] == ["/collective_rpc", "/reset_prefix_cache"]
        assert gap(drawn(source), policy) < 1e-4
        server.failures = [(400, COMPLAINT, {})]
        with pytest.raises(ServerError, match=r"400 Bad Request: .* vLLM reloads whole"):
            source.reload(tmp_path)


def test_an_adapter_that_is_not_taken(policy, server, tmp_path) -> None:
    source = generator(policy, server)
    with pytest.raises(UserError, match=r"contains no LoRA adapter"):
        source.sync(tmp_path)
    moved(0.1, tmp_path / "one")
    with pytest.raises(ServerError, match=r"404 Not Found: .*No adapter found .*can read elsewhere"):
        source.sync(tmp_path / "one", server_folder="elsewhere")
    server.takes_adapters = False
    with pytest.raises(ServerError, match=r"404 .*--enable-lora.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        source.sync(tmp_path / "one")
    assert source.model == "tiny"
