# SPDX-License-Identifier: Apache-2.0
"""A server of vLLM's completions API for tests: HTTP on a local port, drawn by a `CausalLMPolicy`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import Sampling, StoppingCriteria, TextRollout, kept_tokens, log_distribution

Reply = dict[str, Any]


class TinyServer:
    """The served policy, faults on demand, and all requests."""

    def __init__(self, policy: CausalLMPolicy, *, mode: str = "raw_logprobs") -> None:
        self.policy, self.mode = policy, mode
        self.key: str | None = None
        self.max_model_len: int | None = 64
        self.adapters: dict[str, str] = {}
        self.takes_adapters = True
        self.folder: Path | None = None
        """In vLLM's development mode, what it was started on."""
        self.dies: Callable[[str, int], bool] = lambda path, count: False
        """Whether it is killed at the count-th request to a path, from 1 on; it is then started anew."""
        self.start = lambda: self.adapters.clear()
        """What a start does; the weights are those of then."""
        self.away = 0.1
        """Seconds until it is there again."""
        self.starts = 0
        self.failures: list[tuple[int, str, dict[str, str]]] = []
        """Given out first, one per request; status 0 hangs up without an answer."""
        self.alter: Callable[[Reply], Any] = lambda reply: reply
        self.silence = 0.0
        """Seconds before an answer to completions."""
        self.asked: list[tuple[str, Reply]] = []
        """(path, body) of every request."""
        self.url = ""
        self.http: _Threads
        self.closing, self.dying = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    @property
    def completions(self) -> list[Reply]:
        """The bodies of the requests for more than one token, which leaves out the probe's."""
        return [body for path, body in self.asked if path == "/v1/completions" and body["max_tokens"] > 1]

    def answer(self, path: str, body: Reply) -> tuple[int, Any]:
        """Status and body of a reply."""
        if path == "/v1/models":
            cards: list[Reply] = [{"id": "tiny", "max_model_len": self.max_model_len}]
            cards += [{"id": name, "parent": "tiny"} for name in self.adapters]
            return 200, {"object": "list", "data": cards}
        if path == "/v1/completions":
            if body["model"] not in {"tiny", *self.adapters}:
                return 404, _error(f"The model `{body['model']}` does not exist.")
            if self.closing.wait(self.silence):
                return 503, "closing"
            with self._lock:
                return 200, self.alter(self._complete(body))
        if path == "/v1/load_lora_adapter" and self.takes_adapters:
            if body["lora_name"] in self.adapters:
                return 400, _error("has already been loaded")
            if not Path(body["lora_path"]).is_dir():
                return 404, _error(f"No adapter found for {body['lora_path']}")
            with self._lock:
                self.policy.load(Path(body["lora_path"]))
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success: LoRA adapter added."
        if path == "/v1/unload_lora_adapter" and body["lora_name"] in self.adapters:
            del self.adapters[body["lora_name"]]
            return 200, "Success: LoRA adapter removed."
        if path == "/collective_rpc" and self.folder is not None and body == {"method": "reload_weights"}:
            with self._lock:
                self.policy.load(self.folder)
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache" and self.folder is not None:
            return 200, ""
        return 404, {"detail": "Not Found"}

    def _complete(self, body: Reply) -> Reply:
        tokenizer: Any = self.policy.tokenizer
        sampling = Sampling(temperature=body["temperature"], top_k=max(0, body["top_k"]), top_p=body["top_p"])
        prompt_ids = body["prompt"]
        # a tool's ids may differ from its text's tokens: they are read behind the prompt
        prompt = next(
            n
            for n in range(len(prompt_ids), 0, -1)
            if self.policy.prompts.encode([tokenizer.decode(prompt_ids[:n])])[0] == prompt_ids[:n]
        )
        stopping = StoppingCriteria(
            max_new_tokens=body["max_tokens"] + len(prompt_ids) - prompt,
            strings=tuple(body["stop"]),
            eos_ids=tuple(body["stop_token_ids"]) if body["ignore_eos"] else None,
        )
        base = body["model"] == "tiny" and self.policy.lora is not None
        with self.policy.reference() if base else nullcontext():
            rollout = self.policy.generate(
                [tokenizer.decode(prompt_ids[:prompt])], seeds=[body["seed"]], sampling=sampling,
                stopping=stopping, after=[prompt_ids[prompt:]],
            )  # fmt: skip
            assert rollout.prompt_ids[0].tolist() == prompt_ids[:prompt]
            ids = rollout.completion_ids[0, rollout.loss_mask[0] == 1].tolist()
            log_prob, top = self._log_probs(rollout, prompt_ids, ids, body["logprobs"])
        reason = rollout.stop_reason[0]
        names = [f"token_id:{token}" for token in ids]
        choice = {
            "index": 0,
            "text": rollout.text[0],
            "finish_reason": "length" if reason == "length" else "stop",
            "stop_reason": ids[-1] if reason == "eos" else None,
            "logprobs": {"tokens": names, "token_logprobs": log_prob, "top_logprobs": top},
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
        }
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    @torch.no_grad()
    def _log_probs(
        self, rollout: TextRollout, prompt_ids: list[int], ids: list[int], listed: int
    ) -> tuple[list[float], list[dict[str, float]]]:
        """Of the drawn tokens, and the listed most probable ones with the drawn one first, as vLLM does."""
        model: Any = self.policy.model
        logits = model(torch.tensor([prompt_ids + ids]), use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
        log_p = log_distribution(logits)
        if self.mode == "processed_logprobs":
            log_p = log_distribution(logits, rollout.sampling.scale)
            selected = kept_tokens(log_p, rollout.sampling)
            log_p = log_p if selected is None else log_distribution(log_p, kept=selected)
        log_p = log_p.clamp(min=-9999.0)
        top = []
        for token, row in zip(ids, log_p, strict=True):
            best = row.topk(min(listed, row.shape[0]))
            pairs = [(token, row[token]), *zip(best.indices.tolist(), best.values, strict=True)]
            top.append({f"token_id:{candidate}": float(value) for candidate, value in pairs})
        return log_p.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist(), top


def _error(message: str) -> Reply:
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


def _handler(server: TinyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _serve(self, body: Reply) -> None:
            server.asked.append((self.path, body))
            count = sum(path == self.path for path, _ in server.asked)
            if server.dies(self.path, count):
                server.dying.set()
                server.http.shutdown()
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                return self._send(401, json.dumps({"error": "Unauthorized"}))
            if server.failures and self.path != "/v1/models":
                status, text, headers = server.failures.pop(0)
                return self._send(status, text, headers) if status else None
            status, reply = server.answer(self.path, body)
            self._send(status, reply if isinstance(reply, str) else json.dumps(reply))

        def _send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            if server.dying.is_set():
                return
            raw = text.encode()
            try:
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)
            except ConnectionError:  # the client hung up, as it does when it gives up
                return

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    return Handler


class _Threads(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = False


@contextmanager
def serving(policy: CausalLMPolicy, **options: Any) -> Iterator[TinyServer]:
    """Serve a policy while the context lasts."""
    server, ready = TinyServer(policy, **options), threading.Event()

    def serve() -> None:
        """One server after another, all at the first's port."""
        port = 0
        while not server.closing.wait(server.away if port else 0):
            with _Threads(("127.0.0.1", port), _handler(server)) as server.http:
                server.start()
                server.dying.clear()
                port, server.starts = server.http.server_address[1], server.starts + 1
                server.url = f"http://127.0.0.1:{port}/v1"
                ready.set()
                server.http.serve_forever(poll_interval=0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        server.closing.set()
        server.http.shutdown()
        thread.join()
