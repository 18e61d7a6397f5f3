"""Trains a PyTorch model whose weights, gradients and optimizer state are sharded among the ranks."""

import torch

from tandem.fsdp import FullyShardedDataParallel

layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
model = FullyShardedDataParallel(torch.nn.Sequential(*layers), torch.bfloat16)  # None: computes in f32
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # updates the rows of this rank
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(torch.randn(16, 32)) - 1).square().mean()
    loss.backward()  # gradients are averaged when it returns
    model.clip_grad_norm_(1.0)
    optimizer.step()
whole = model.full_state_dict()  # every rank must call it; torch.save can store it
print(f"loss {loss.item():.3f}, weights sum to {sum(x.sum().item() for x in whole.values()):.6f}", flush=True)
