#!/usr/bin/env python3
"""The same work in PyTorch, for scripts/gpu-check.sh: attention by its FLASH and CUDNN backends, products, a step of
gpt2-small.

Shapes, repetitions and counted FLOPs are those of crates/cuda/examples/speed.rs. `--json FILE` writes what is
printed."""

import json
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"torch isn't here, so nothing is compared: {error}")
    sys.exit(0)
if not torch.cuda.is_available():
    print("torch finds no GPU, so nothing is compared")
    sys.exit(0)

ROWS = []


def seconds(calls, rounds=7, each=10):
    """Median seconds of one call; `calls` are taken in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for r in range(rounds):
        start = time.perf_counter()
        for i in range(each):
            calls[(r * each + i) % len(calls)]()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / each)
    return statistics.median(times)


def report(what, shape, took, amount, unit):
    rate = amount / took / 1e12
    print(f"{'torch ' + what:<28} {shape:<32} {took * 1e3:>10.4f} ms {rate:>9.3f} {unit}")
    ROWS.append({"what": what, "shape": shape, "ms": took * 1e3, "rate": rate, "unit": unit})


def products():
    for m, n, k in [(4096, 4096, 4096), (8192, 3072, 768), (8192, 50304, 768)]:
        for name, dtype in [("bf16", torch.bfloat16), ("f32", torch.float32)]:
            made = {"device": "cuda", "dtype": dtype}
            pairs = [(torch.randn(m, k, **made), torch.randn(k, n, **made)) for _ in range(2)]
            took = seconds([lambda a=a, b=b: a @ b for a, b in pairs])
            report("matmul", f"{m} x {n} x {k} {name}", took, 2 * m * n * k, "TFLOP/s")


def attention():
    for name, backend in [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]:
        for size in [64, 128]:
            for t in [1024, 2048, 4096, 8192, 16384]:
                for causal in [False, True]:
                    batch, heads = 16384 // t, 2048 // size
                    operands = []
                    for _ in range(2):
                        shape, made = (batch, t, heads, size), {"device": "cuda", "dtype": torch.bfloat16}
                        q, k, v, g = (torch.randn(shape, **made).transpose(1, 2) for _ in range(4))
                        operands.append((q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g))
                    label = f"{batch}x{t}x{heads}x{size}{' causal' if causal else ''}"
                    flops = 4 * batch * heads * size * t * t * (0.5 if causal else 1)
                    try:
                        with sdpa_kernel(backend):
                            attend = lambda o: F.scaled_dot_product_attention(*o[:3], is_causal=causal)
                            grad = lambda y, o: torch.autograd.grad(y, o[:3], o[3], retain_graph=True)
                            forward = seconds([lambda o=o: attend(o) for o in operands])
                            outputs = [(attend(o), o) for o in operands]
                            backward = seconds([lambda y=y, o=o: grad(y, o) for y, o in outputs])
                    except RuntimeError as error:
                        print(f"torch attention {name} {label}: {str(error).splitlines()[0]}")
                        continue
                    report(f"attention forward {name}", label, forward, flops, "TFLOP/s")
                    report(f"attention backward {name}", label, backward, 2.5 * flops, "TFLOP/s")


class Block(torch.nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt2(torch.nn.Module):
    """gpt2-small, with the batch that `retape step --model gpt2-small` has by default."""

    def __init__(self, layers=12, dim=768, heads=12, vocab=50257, seq=1024):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, dim), torch.nn.Embedding(seq, dim)
        self.blocks = torch.nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(dim)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device="cuda"))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step():
    model, batch = Gpt2().cuda(), int(sys.argv[sys.argv.index("--batch") + 1]) if "--batch" in sys.argv else 1
    tokens, targets = (torch.randint(0, 50257, (batch, 1024), device="cuda") for _ in range(2))

    def once():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        model.zero_grad()

    took = seconds([once], rounds=5, each=3)
    flops = 6 * sum(p.numel() for p in model.parameters()) * tokens.numel()
    report("gpt2-small step", f"batch {batch} bf16 (parameters' FLOPs)", took, flops, "TFLOP/s")


for part in [products, attention, step]:
    part()
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump({"torch": torch.__version__, "rows": ROWS}, file, indent=1)
