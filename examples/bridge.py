"""Trains a PyTorch model with data parallelism and a sharded optimizer of libtandem."""

import torch

from tandem import DataParallel, FlashAttention, ShardedOptimizer

q = torch.randn(1, 64, 32, requires_grad=True)
FlashAttention.apply(q, q, q, True).sum().backward()  # [batch, seq, d], causal

model = DataParallel(torch.nn.Linear(32, 8), "bucketed", bucket_mb=25)
optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(torch.randn(16, 32)) - 1).square().mean()
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
print(f"loss {loss.item():.3f}, weights sum to {model.module.weight.sum().item():.6f}", flush=True)
