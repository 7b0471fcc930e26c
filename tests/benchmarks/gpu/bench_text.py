# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of text rollouts at the size of Qwen3-0.6B: our loop, a captured decode, transformers."""

import argparse
import time

import torch
from measure import CUDA, DEVICE, alone, attempt, emit, end_after, free, kernels, peak, sync
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, StaticCache

from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import StoppingCriteria

p = argparse.ArgumentParser()
p.add_argument("--tiny", action="store_true")
p.add_argument("--seconds", type=int, default=150)
p.add_argument(
    "--grouped",
    action="store_true",
    help="attention of a decoding step as products by key head, without copies of keys",
)
p.add_argument("--steps", nargs="*", default=["own", "graph", "own256", "compiled", "generate"])
a = p.parse_args()
end_after(a.seconds)
tok = AutoTokenizer.from_pretrained("assets/tasks-qwen3")
h, layers, vocab = (64, 2, 500) if a.tiny else (1024, 28, 151936)
config = Qwen3Config(
    vocab_size=vocab,
    hidden_size=h,
    intermediate_size=3 * h,
    num_hidden_layers=layers,
    num_attention_heads=2 if a.tiny else 16,
    num_key_value_heads=1 if a.tiny else 8,
    head_dim=32 if a.tiny else 128,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    bos_token_id=tok.bos_token_id,
    eos_token_id=tok.eos_token_id,
    pad_token_id=tok.pad_token_id,
)
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device(DEVICE):
    model = Qwen3ForCausalLM(config).eval()
torch.set_default_dtype(torch.float32)
emit(bench="text size", billions=sum(q.numel() for q in model.parameters()) / 1e9)


def grouped(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """Attention of several query heads per key head; one query: two products with the cache as it lies."""
    b, heads, s, d = query.shape
    n = key.shape[1]
    if s > 1:
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(heads // n, 1),
            value.repeat_interleave(heads // n, 1),
            attn_mask=attention_mask,
            scale=scaling,
        )
        return out.transpose(1, 2), None
    scores = (query.view(b, n, heads // n, d) @ key.transpose(2, 3)).float() * scaling
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).view(b, 1, heads, d), None


if a.grouped:
    from transformers import AttentionInterface

    AttentionInterface.register("grouped", grouped)
    config._attn_implementation = "grouped"
    model.set_attn_implementation("grouped")
P, G = (2, 2) if a.tiny else (32, 8)
LENGTHS = (4, 8) if a.tiny else (64, 256)
prompts = [f"What is {i} plus {7 * i}?" for i in range(10, 10 + P)]


def own(length, batch):
    with attempt(f"own loop {length} {batch}"):
        policy = CausalLMPolicy(model, tok, reference=False, generate_batch=batch)

        def run(n):
            return policy.generate(
                prompts, seeds=0, num_generations=G, stopping=StoppingCriteria(max_new_tokens=n, eos_ids=())
            )

        run(3)
        with alone(), peak() as m:
            sync()
            t = time.perf_counter()
            r = run(length)
            sync()
            dt = time.perf_counter() - t
        emit(
            bench="text own loop",
            completions=P * G,
            tokens=length,
            generate_batch=batch,
            s=round(dt, 2),
            tokens_per_s=round(float(r.loss_mask.sum()) / dt),
            gib=m["gib"],
            prompt_tokens=r.prompt_ids.shape[1],
        )


class Decode:
    """A step of decoding on a static cache without a look from the host: log-prob, entropy and the next token."""

    def __init__(self, length):
        ids = (
            torch.tensor([tok(x)["input_ids"][:8] + [5] * (8 - len(tok(x)["input_ids"][:8])) for x in prompts])
            .repeat_interleave(G, 0)
            .to(DEVICE)
        )
        self.prompt, self.n, self.width = ids, len(ids), ids.shape[1] + length
        self.cache = StaticCache(config=model.config, max_cache_len=self.width)
        self.token = torch.zeros(self.n, dtype=torch.long, device=DEVICE)
        self.place = torch.zeros(1, dtype=torch.long, device=DEVICE)
        self.uniform = torch.rand(length + 1, self.n, device=DEVICE)
        self.ids = torch.zeros(length + 1, self.n, dtype=torch.long, device=DEVICE)
        self.log_prob, self.entropy = torch.zeros(2, length + 1, self.n, device=DEVICE)
        self.columns = torch.arange(self.width, device=DEVICE)
        self.count = torch.zeros(1, dtype=torch.long, device=DEVICE)

    def sample(self, hidden):
        w = model.lm_head.weight
        logits = torch.mm(hidden, w.t(), out_dtype=torch.float32) if CUDA else (hidden @ w.t()).float()
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        total = p.cumsum(-1)
        u = self.uniform.index_select(0, self.count)[0]
        token = torch.searchsorted(total, (u * total[:, -1])[:, None]).squeeze(1).clamp(max=vocab - 1)
        self.log_prob.index_copy_(0, self.count, log_p.gather(1, token[:, None]).T)
        self.entropy.index_copy_(0, self.count, -(p * log_p).sum(1)[None])
        self.ids.index_copy_(0, self.count, token[None])
        self.token.copy_(token)
        self.count.add_(1)

    def first(self):
        s = self.prompt.shape[1]
        mask = (self.columns[None] <= torch.arange(s, device=DEVICE)[:, None])[None, None].expand(
            self.n, 1, s, self.width
        )
        out = model.model(
            input_ids=self.prompt,
            attention_mask={"full_attention": mask},
            position_ids=torch.arange(s, device=DEVICE)[None].expand(self.n, s),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.place.fill_(s)
        self.sample(out.last_hidden_state[:, -1])

    def step(self):
        mask = (self.columns <= self.place)[None, None, None].expand(self.n, 1, 1, self.width)
        out = model.model(
            input_ids=self.token[:, None],
            attention_mask={"full_attention": mask},
            position_ids=self.place[None].expand(self.n, 1),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.place.add_(1)
        self.sample(out.last_hidden_state[:, -1])


@torch.no_grad()
def captured(length, compiled):
    name = ("captured, compiled" if compiled else "captured") + (", grouped heads" if a.grouped else "")
    with attempt(f"decode {name} {length}"):
        t = time.perf_counter()
        d = Decode(length)
        step = torch.compile(d.step, dynamic=False) if compiled else d.step
        d.first()
        step()
        step()
        if CUDA:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        else:
            replay = step
        done = int(d.count)
        sync()
        made = time.perf_counter() - t
        with alone(), peak() as m:
            sync()
            t = time.perf_counter()
            for _ in range(length - done):
                replay()
            sync()
            dt = time.perf_counter() - t
        emit(
            bench="text decode",
            name=name,
            tokens=length,
            steps=length - done,
            s=round(dt, 3),
            ms_per_step=round(dt / (length - done) * 1e3, 2),
            tokens_per_s=round(d.n * (length - done) / dt),
            make_s=round(made, 1),
            gib=m["gib"],
            entropy=float(d.entropy[:length].mean()),
            log_prob=float(d.log_prob[:length].mean()),
        )
        if length == LENGTHS[-1] and CUDA:
            d.count.fill_(5)
            d.place.fill_(40)
            d.cache.layers[0].cumulative_length.fill_(20)
            for layer in d.cache.layers:
                layer.cumulative_length.fill_(20)
            emit(bench="text kernels", name=name, kernels=kernels(replay, 14))
        del d
    free()


def generate(length, static):
    with attempt(f"generate {length} {static}"), torch.no_grad():
        ids = torch.randint(5, 300, (P, 8), device=DEVICE).repeat_interleave(G, 0)
        options = dict(
            do_sample=True, max_new_tokens=length, min_new_tokens=length, top_k=0, top_p=1.0, temperature=1.0
        )
        if static:
            options["cache_implementation"] = "static"
        run = lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)  # noqa: E731
        t = time.perf_counter()
        run()
        sync()
        first = time.perf_counter() - t
        with alone():
            sync()
            t = time.perf_counter()
            out = run()
            sync()
            dt = time.perf_counter() - t
        emit(
            bench="text generate",
            static=static,
            tokens=length,
            first_s=round(first, 1),
            s=round(dt, 2),
            tokens_per_s=round(P * G * (out.shape[1] - 8) / dt),
        )
    free()


if "own" in a.steps:
    own(LENGTHS[0], P * G)
    own(LENGTHS[0], P * G // 4)
if "graph" in a.steps:
    captured(LENGTHS[0], False)
    captured(LENGTHS[1], False)
if "own256" in a.steps:
    own(LENGTHS[1], P * G)
if "compiled" in a.steps:
    captured(LENGTHS[1], True)
if "generate" in a.steps:
    generate(LENGTHS[0], False)
    generate(LENGTHS[0], True)
    generate(LENGTHS[1], True)
