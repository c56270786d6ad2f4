# A training loop with the log style, pace, workers, evaluation and checkpoints that the options ask for.
import argparse
import json
import logging
import multiprocessing as mp
import os
import sys
import threading
import time

p = argparse.ArgumentParser()
p.add_argument("--style", default="plain")
p.add_argument("--step", type=float, default=0.3)
p.add_argument("--work", default="sleep", choices=["sleep", "cpu", "torch", "duty", "async"])
p.add_argument("--every", type=int, default=1)
p.add_argument("--total", type=int, default=100000)
p.add_argument("--first", type=int, default=5)  # fast steps first, so that a pace is known
p.add_argument("--accum", type=int, default=1)
p.add_argument("--eval-at", type=int)
p.add_argument("--save-at", type=int)
p.add_argument("--slow-at", type=int)  # from this step on each takes --slow seconds
p.add_argument("--slow", type=float, default=5.0)
p.add_argument("--tracker")
p.add_argument("--mute", action="store_true")
p.add_argument("--workers", type=int, default=0)
p.add_argument("--method", default="fork")
p.add_argument("--item", type=float, default=0.05)
a = p.parse_args()


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(i * i for i in range(2000))


def work(seconds):
    if a.work == "sleep":
        time.sleep(seconds)
    elif a.work == "cpu":
        busy(seconds)
    elif a.work == "duty":
        busy(seconds * 0.1)
        time.sleep(seconds * 0.9)
    elif a.work == "torch":
        end = time.time() + seconds
        while time.time() < end:
            (x @ x).sum().item()
    else:  # the main thread waits, a thread of the runtime computes (as in JAX)
        job = threading.Thread(target=busy, args=(seconds,))
        job.start()
        job.join()


def line(step, loss, dt):
    s = a.style
    if s == "plain":
        print(f"step {step} loss {loss:.4f}")
    elif s == "hf":
        print({"loss": f"{loss:.4f}", "grad_norm": "1.23", "learning_rate": "5e-05", "epoch": f"{step / 1000:.2f}"})
    elif s == "torchtitan":
        print(
            f"\x1b[31mstep: {step:2d}  \x1b[32mloss: {loss:7.4f}  \x1b[33mmemory: 3.20GiB(3.40%)  \x1b[34mtps: 6,234  \x1b[36mtflops: 45.01  \x1b[35mmfu: 9.40%\x1b[39m"
        )
    elif s == "megatron":
        print(
            f" [{time.strftime('%F %T')}] iteration {step:8d}/{a.total:8d} | consumed samples: {step * 8:12d} | elapsed time per iteration (ms): {dt * 1e3:.1f} | learning rate: 1.5E-06 | global batch size:     8 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    elif s == "nanogpt":
        print(f"iter {step}: loss {loss:.4f}, time {dt * 1e3:.2f}ms, mfu 12.30%")
    elif s == "keras":
        print(
            f"{step}/{a.total} ━━━━━━━━━━━━━━━━━━━━ {int((a.total - step) * dt)}s {dt:.0f}s/step - accuracy: 0.4312 - loss: {loss:.4f}"
        )
    elif s == "json":
        print(json.dumps({"step": step, "loss": round(loss, 4), "lr": 1e-4, "time": time.time()}))
    elif s == "deepspeed":
        print(
            f"[{time.strftime('%F %T')},123] [INFO] [logging.py:128:log_dist] [Rank 0] step={step}, skipped=0, lr=[5e-05], mom=[[0.9, 0.999]]"
        )
    elif s == "openclip":
        print(
            f"{time.strftime('%F,%T')} | INFO | Train Epoch: 0 [{step * 256:>6}/788603 ({100 * step * 256 / 788603:.0f}%)] Data (t): 0.008 Batch (t): {dt:.3f}, 800/s LR: 0.0005 Loss: {loss:.4f}"
        )
    elif s == "mm":
        print(
            f"{time.strftime('%F %T')},100 - mmdet - INFO - Epoch [2][{step}/8541]\tlr: 1.000e-02, eta: 11:31:27, time: {dt:.3f}, data_time: 0.008, memory: 3300, loss: {loss:.4f}"
        )
    elif s == "logging":
        logging.info("epoch 1 step %d/%d loss=%.4f lr=1.0e-04", step, a.total, loss)
    elif s == "dots":
        sys.stdout.write(".")
    elif s == "none":
        pass
    else:
        sys.exit(f"no style {s}")


def fetch(jobs, done):
    while True:
        item = jobs.get()
        time.sleep(a.item)
        done.put(item)


def main():
    global x
    if a.work == "torch":
        import torch

        torch.set_num_threads(1)
        x = torch.randn(256, 256)
    logging.basicConfig(format="%(asctime)s [%(levelname)s] %(name)s: %(message)s", level=logging.INFO)
    context = mp.get_context(a.method)
    jobs, done = context.Queue(), context.Queue()
    for _ in range(a.workers):
        context.Process(target=fetch, args=(jobs, done), daemon=True).start()
    for i in range(2 * a.workers):
        jobs.put(i)
    print("loading data ... 50000 samples loaded")
    print(
        f"***** Running training *****\n  Num examples = 50000\n  Gradient Accumulation steps = {a.accum}\n  Total optimization steps = {a.total:,}"
    )
    steps = range(1, a.total + 1)
    bar = None
    if a.style == "tqdm":
        from tqdm import tqdm

        bar = steps = tqdm(steps, desc="Training", initial=0)
    elif a.style == "rich":
        from rich.progress import track

        steps = track(steps, description="Training")
    for step in steps:
        begin = time.time()
        seconds = min(a.step, 0.3) if step <= a.first else a.step
        if a.slow_at and step >= a.slow_at:
            seconds = a.slow
        for _ in range(a.accum):
            if a.workers:
                jobs.put(done.get())
            work(seconds)
        loss = 8.0 / step**0.3
        if bar is not None:
            bar.set_postfix(loss=f"{loss:.3f}")
        elif step % a.every == 0 and not a.mute and a.style != "rich":
            line(step, loss, time.time() - begin)
        if a.tracker:
            with open(a.tracker, "a") as out:
                out.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if step == a.eval_at:
            print("***** Running Evaluation *****\n  Num examples = 2000\n  Batch size = 8")
            busy(1e9)
        if step == a.save_at:
            os.makedirs(f"checkpoint-{step}", exist_ok=True)
            print(f"Saving model checkpoint to ./checkpoint-{step}")
            with open(f"checkpoint-{step}/model.safetensors", "wb") as out:
                for _ in range(2000):
                    out.write(os.urandom(1 << 20))
                    out.flush()
                    time.sleep(0.2)


if __name__ == "__main__":
    main()
