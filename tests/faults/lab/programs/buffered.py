# Prints every step, without -u: the lines wait in a block of 8 KiB.
import time

for step in range(1, 100000):
    sum(i * i for i in range(50000 if step < 300 else 600000))
    time.sleep(0.001 if step < 300 else 0.3)
    print(
        f"[train] epoch 1 step {step:6d}/100000 loss={8 / step**0.3:.4f} lr=1.0e-04 grad_norm=1.2345 tokens/s=12345 mem=17.6GB"
    )
