# torch.compile on the CPU, for real: several models, one after the other, nothing else.
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(self.n(x))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("model built, 12 layers", flush=True)
    for round_ in range(50):
        width = 64 + 8 * round_
        model = torch.compile(nn.Sequential(*[Block(width) for _ in range(10)]), dynamic=False)
        model(torch.randn(4, width)).sum().backward()
    print("step 1 loss 7.1", flush=True)
