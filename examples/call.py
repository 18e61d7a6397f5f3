"""C's flash attention on PyTorch's tensors, compared with PyTorch's attention."""

import torch

from tandem.library import Library

c = Library().open()
x = torch.randn(1, 8, 1024, 64)
y = torch.empty_like(x)
shape = c.struct("td_attention_shape", batch=1, heads=8, seq=1024, head_dim=64, dtype="f32", causal=True)
sizes = c.value("td_flash_sizes", c.device, shape)
c.td_flash_forward(c.device, shape, x, x, x, y, c.work(sizes.saved), c.work(sizes.forward_work))

torch.testing.assert_close(y, torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True))
print("C and PyTorch agree")
