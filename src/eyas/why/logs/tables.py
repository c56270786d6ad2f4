"""The words of training logs, as data: which sentence means which event.

Every rule has lower-case `hints`; a rule's pattern is tried only on lines that contain one of them, and a rule whose
hints are nowhere in the text is not tried at all. Patterns are linear: no nested repetition, every repetition bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eyas.why.logs.facts import ErrorKind, PhaseId


@dataclass(frozen=True)
class Rule:
    """`pattern` None: the hint alone decides."""

    kind: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str] | None = None


def _rule(kind: str, *hints: str, pattern: str | None = None) -> Rule:
    return Rule(kind, hints, re.compile(pattern, re.I) if pattern else None)


# How a shell, make, time or systemd says that its child died by a signal: after all that the child itself said.
_SHELL = (r"^(?:{0}(?:: \d{{1,2}})?$|g?make(?:\[\d{{1,3}}\])?: \*\*\* \[.{{1,240}}\] (?:{0}|error (?:{1}))$"
          r"|.{{1,120}}: line \d{{1,6}}: +\d{{1,9}} {0}\b|\[\d{{1,3}}\] ?[+-]? +(?:\d{{1,9}} +)?{0}\b"
          r"|(?:zsh|bash|-?sh|dash|ksh|fish): (?:job \d{{1,3}}, .{{1,120}}? )?{0}\b"
          r"|command terminated by signal (?:{2})\b"
          r"|.{{1,120}}code=killed, status=(?:{2})/)")  # fmt: skip
_ENDED = _SHELL.format("(?:terminated|hangup|user defined signal [12])", "129|138|140|143", "1|10|12|15")
_KILLED = _SHELL.format("killed", "137", "9")
_INTERRUPTED = _SHELL.format("interrupt", "130", "2")
DEATH = re.compile(f"{_ENDED}|{_KILLED}|{_INTERRUPTED}", re.I)
_OWN = r"(?:\[\d{1,2}/\d{1,2} [a-z]{1,20}\] )?"  # eyas demo puts the stage in front

# ---- failures; the first rule that fits a line names it ----
ERRORS: tuple[Rule, ...] = (
    _rule("time-limit", "due to time limit", "due to task timeout"),
    _rule("preempted", "due to preemption", "job was preempted", "preempted by slurm", "spot interruption",
          "preemption notice", "job preempted"),
    _rule("node-failure", "due to node failure", "node_fail", "due to launch failure"),
    _rule("host-oom", "oom_kill", "oom-kill", "oomkilled", "out of memory: kill", "srun: error",
          "cannot allocate memory", "oom killer", "out-of-memory killer", "std::bad_alloc", "memoryerror",
          "killed due to memory pressure",
          pattern=r"oom.?kill|out-of-memory killer|out of memory: kill|: out of memory|cannot allocate memory"
                  r"|std::bad_alloc"
                  r"|\bMemoryError\b|killed due to memory pressure"),
    _rule("cancelled", "cancelled at", "cancelled by", pattern=r"\*\*\* .{0,80}cancelled (?:at|by)|cancelled by \d"),
    _rule("gpu-oom", "out of memory", "outofmemoryerror", "resource_exhausted", "cublas_status_alloc_failed",
          "cuda_error_out_of_memory",
          pattern=r"cuda (?:error: )?out of memory|hip out of memory|outofmemoryerror|cuda_error_out_of_memory"
                  r"|resource_?exhausted(?:error)?: .{0,80}(?:out of memory|oom|allocat)|cublas_status_alloc_failed"
                  r"|out of memory (?:while|when) trying to allocate|xpu out of memory"),
    _rule("gpu-error", "illegal memory access", "device-side assert", "device assert", "unspecified launch failure",
          "misaligned address", "uncorrectable", "cuda error", "cuda driver error", "hip error", "xid (pci", "xid:",
          "fallen off the bus", "cublas_status_", "cudnn_status_", "gpu is lost", "unknown error", "cuda kernel errors",
          "illegal instruction was encountered", "nvrm:", "hardware error",
          pattern=r"illegal memory access|device.side assert|unspecified launch failure|misaligned address"
                  r"|uncorrectable .{0,20}(?:ecc|error)|(?:cuda|hip) (?:driver )?error(?::| \d| at )"
                  r"|\bxid\b ?(?:\(pci|:? ?\d)"
                  r"|fallen off the bus|cublas_status_(?!success|alloc)|cudnn_status_(?!success)|gpu is lost"
                  r"|device handle .{0,60}unknown error|illegal instruction was encountered"),
    _rule("shm-full", "bus error", "shared memory", "/dev/shm", "sigbus",
          pattern=r"\bbus error\b|insufficient shared memory|unable to (?:open|mmap|allocate|write to) .{0,20}shared"
                  r" memory|/dev/shm.{0,120}no space left|no space left.{0,120}/dev/shm|\bsigbus\b"),
    _rule("disk-full", "no space left on device", "disk quota exceeded", "errno 28]", "errno 122]", "os error 28"),
    _rule("worker-died", "dataloader worker",
          pattern=r"dataloader worker \(pid(?:\(s\))? [\d, ]{1,200}\) (?:is killed by signal|exited unexpectedly)"),
    _rule("native-crash", "segmentation fault", "core dumped", "fatal python error", "sigsegv", "sigabrt",
          "double free", "terminate called", "stack smashing", "free(): ", "malloc(): ", "aborted (", "corrupted size",
          "sigill",
          pattern=r"segmentation fault|core dumped|fatal python error|\bsig(?:segv|abrt|ill)\b|double free"
                  r"|terminate called (?:after|without)|stack smashing|\bfree\(\): |malloc\(\): |corrupted size"),
    _rule("collective-timeout", "collective operation timeout", "watchdog", "heartbeat monitor", "timed out waiting",
          "nccl operation", "monitoredbarrier", "nccl timeout", "blocking wait",
          pattern=r"collective operation timeout|watchdog (?:got stuck|thread terminated|stuck|caught)"
                  r"|watchdog.{0,40}stuck for|heartbeat monitor timed out"
                  r"|timed out waiting \d+ ?ms for (?:recv|send)|nccl operations? (?:have )?failed or timed out"
                  r"|monitoredbarrier.{0,80}(?:failed|timed out)"),
    _rule("rendezvous", "rendezvous", "clients joined", "client socket has timed out", "distnetworkerror",
          "failed to connect to", "socket timeout", "waiting for clients",
          pattern=r"rendezvous.{0,60}(?:timed out|timeout|error|closed|failed)|clients joined|client socket has timed"
                  r"|distnetworkerror|failed to connect to (?!.{0,160}errno: 97)|socket timeout"
                  r"|timed out after .{0,40}waiting for clients"),
    _rule("peer-lost", "closed by peer", "reset by peer", "ncclremoteerror", "ncclsystemerror", "ncclinternalerror",
          "communicator was aborted", "unhandled system error", "ncclunhandledcudaerror", "broken pipe",
          "connection refused", "remote process exited"),
    _rule("interrupted", "keyboardinterrupt", "interrupt", "error 130", "terminated by signal", "code=killed",
          "stopped after step",
          pattern=rf"^keyboardinterrupt|{_INTERRUPTED}|^{_OWN}\w{{1,32}} [\d,/]{{1,32}}: interrupted(?: · |$)"
                  rf"|^{_OWN}stopped after step [\d,/]{{1,32}}, and saved"),
    _rule("exception", "failed in ", "] error ",
          pattern=rf"^{_OWN}(?:\w{{1,32}} [\d,/]{{1,32}}|before the first \w{{1,32}}): failed in [\w ]{{1,24}}: "
                  r"|^g?make(?:\[\d{1,3}\])?: \*\*\* \[.{1,240}\] error (?!129|137|138|140|143)\d{1,3}$"),
    _rule("signal", "error 129", "error 138", "error 140", "error 143", "user defined signal", "code=killed",
          "sigterm", "sighup", "sigint", "signal 15", "signal 1 ", "signal: 15", "signal 2",
          "signalexception", "terminated", "hangup", "sigusr", "received signal", "got signal", "caught signal",
          "death signal", "termination signal",
          pattern=r"signal (?:15|1|2|10|12)\b.{0,20}(?:received|\(sig)"
                  r"|(?:received|got|caught|(?:killed|terminated|stopped) by)"
                  r" .{0,24}(?:sig(?:term|hup|int|usr[12])|signal:? ?\d|death signal|termination signal)"
                  r"|got signal|received signal|received \d{1,2} death signal|closing signal sig"
                  rf"|: terminated$|: hangup$|{_ENDED}"),
    _rule("killed", "killed", "error 137", "terminated by signal 9",
          pattern=rf"{_KILLED}|\(pid \d{{1,9}}\) was killed by sigkill"
                  r"|^killed\b\s*$|task \d.{0,20}: killed|: +\d+ killed\b|line \d+: .{0,20} killed\b"
                                      r"|received sigkill|signal 9 \(sigkill\)"),
)  # fmt: skip
# What the text of a Python exception makes of it; a kind that a bare line must not get.
EXCEPTION_TEXT: tuple[Rule, ...] = (
    *(r for r in ERRORS if r.kind not in ("killed", "signal", "cancelled", "interrupted", "peer-lost")),
    _rule("interrupted", "keyboardinterrupt"),
    _rule("peer-lost", "closed by peer", "reset by peer", "ncclremoteerror", "ncclsystemerror", "ncclinternalerror",
          "communicator was aborted", "unhandled system error"),
    _rule("signal", "signalexception", "got signal"),
    _rule("rank-failed", "childfailederror", "processraisedexception", "processexitedexception", "calledprocesserror"),
    _rule("rendezvous", "diststoreerror", "rendezvousclosederror", "rendezvoustimeouterror"),
    _rule("collective-timeout", "distbackenderror"),
)  # fmt: skip

# How near to the root of a failure each kind lies: 0 explains the others, 5 follows from them.
DEPTH: dict[ErrorKind, int] = {
    "time-limit": 0, "preempted": 0, "cancelled": 0, "node-failure": 0, "gpu-oom": 0, "gpu-error": 0, "host-oom": 0,
    "disk-full": 0, "shm-full": 0,
    "native-crash": 1, "killed": 1, "exception": 1, "worker-died": 1,
    "child-exception": 2, "interrupted": 2, "collective-timeout": 2,
    "signal": 3, "rendezvous": 3, "peer-lost": 3, "rank-failed": 4, "thread-exception": 5,
}  # fmt: skip

# ---- the end of training ----
ENDS: tuple[Rule, ...] = (
    _rule("end", "train_runtime", pattern=r"['\"]train_runtime['\"] ?:|^\s*train_runtime +="),
    _rule("end", "training complete", "training is complete", "training finished", "training has finished",
          "finished training", "training done", "done training", "training ended", "training successfully",
          "finished fine-tuning", "fine-tuning complete", "finetuning complete", "done with training",
          "[after training is done]", "training run completed", "train completed", "training was completed",
          pattern=r"\[after training is done\]|(?:training|fine-?tuning|train|run)"
                  r"(?: (?:is|has|was|run|job|ended|loop))?(?: been)? (?:complete|completed|finished|done|ended"
                  r"|successfully)\b(?!.{0,20}\b(?:epoch|iter|step)s? \d)|(?:finished|done|completed)(?: with)?"
                  r" (?:training|fine-?tuning)\b(?!.{0,20}\b(?:epoch|iter|step)s? \d)"),
    _rule("end", "trainer.fit", pattern=r"trainer\.fit` ?stopped: `max_"),
    _rule("end", "epochs completed in", pattern=r"\d+ epochs completed in"),
    _rule("end", "training time", pattern=r"^(?:total )?training time:? +\d"),
    _rule("end", "run summary:", "run history:", pattern=r"^wandb: +run (?:summary|history):"),
    _rule("end", "model successfully saved", "training completed!"),
    _rule("end", "early stopp", "stopping early",
          pattern=r"early stopping (?:triggered|activated|condition)|early stopped|^stopping early"),
    _rule("end", "done: ", "done (", "decoding (", "the head agrees", "summary.json",  # eyas train, eval, capture, demo
          pattern=r"^done(?: \(.{1,24}\))?: [\d,]{1,15} steps in [\d,]|^decoding \([\d,]{1,12} prompts, "
                  r"|^capture: [\d,]{1,15} MB; the head agrees|^summary: .{1,300}summary\.json · drafter: "),
    _rule("end", "exiting program at iteration", "finished at step", "reached max_steps", "reached max steps"),
)  # fmt: skip

# ---- phases: (id, opens, closes) ----
_SAVE_END = (r"(?:saved(?! in [^\d])|wrote|written|finished saving|done saving).{0,80}(?:checkpoint|model|state"
             r"|\.pt|weights)|checkpoint.{0,80}(?:saved(?! in [^\d])|written)"
             r"|(?:checkpoint|weights|model) saved(?! in [^\d])")  # fmt: skip
PHASE_RULES: tuple[tuple[PhaseId, Rule, bool], ...] = (
    ("evaluating", _rule("close", "eval_", "val loss", "val_loss", "evaluation", "validation",
                         pattern=r"['\"]eval_(?:loss|runtime)|\bval(?:idation)?[_ ]loss ?[:=]? ?\d"
                                 r"|(?:evaluation|validation).{0,20}(?:done|complete|finished|took|result)"
                                 r"|validation loss at iteration"), True),
    ("evaluating", _rule("open", "running evaluation", "running validation", "evaluating", "start evaluation",
                         "starting evaluation", "starting validation", "running prediction", "begin evaluation",
                         "running test", "validating", "evaluation at step"), False),
    ("checkpointing", _rule("close", "saved", "saving", "written", "wrote", pattern=_SAVE_END), True),
    ("checkpointing", _rule("open", "saving", "save checkpoint", "writing checkpoint", "checkpointing",
                            "configuration saved in", "consolidat",
                            pattern=r"\bsaving\b.{0,60}(?:checkpoint|model|state|weights|optimi[sz]er|shard|full)"
                                    r"|save checkpoint|writing checkpoint|checkpointing (?:at|step|model|to)"
                                    r"|consolidating|configuration saved in"), False),
    ("compiling", _rule("close", "compil", "autotun",
                        pattern=r"(?:compilation|compiling|compile|autotun\w{0,6}).{0,40}(?:finished|done|complete|took)"
                                r"|compiled (?:in|after|successfully)|ninja: no work"), True),
    ("compiling", _rule("open", "compil", "autotun", "torch._dynamo", "torch._inductor", "using /root/.cache/torch_ext",
                        "emitting ninja", "building extension module", "torch_extensions", "capturing cuda graph",
                        "[1/", "tracing", "xla::", "jit_",
                        pattern=r"\bcompiling\b|compil(?:e|ation) (?:start|with|model|the|may|can|of)|autotun(?:e|ing)"
                                r"|emitting ninja|building extension module"
                                r"|^\[\d+/\d+\] .{0,60}(?:nvcc|c\+\+|g\+\+|gcc)"
                                r"|torch_extensions.{0,60}(?:root|as|cache)|capturing cuda graph|slow compile"
                                r"|recompil|finished tracing|torch\._(?:dynamo|inductor)\S{0,60}:"), False),
    ("downloading", _rule("close", "download", pattern=r"downloaded|download.{0,40}(?:complete|finished|done)"), True),
    ("downloading", _rule("open", "download", "fetching", pattern=r"\bdownloading\b|fetching \d+ files"
                                                                  r"|download(?:s|ing)? .{0,30}https?://"), False),
    ("tokenising", _rule("close", "tokeni", "preprocess",
                         pattern=r"(?:tokeni[sz]ation|tokeni[sz]ing|preprocessing).{0,40}(?:done|complete|finished|took)"
                                 r"|tokeni[sz]ed \d"), True),
    ("tokenising", _rule("open", "tokenizing", "tokenising", "tokenization", "preprocessing", "packing ",
                         "running tokenizer", "prepared dataset",
                         pattern=r"tokeni[sz]ing|running tokeni[sz]er"
                                 r"|\bpreprocessing\b(?: (?:data|dataset|the)|\.\.\.|$)"
                                 r"|\bpacking (?:data|seq|sample|train)|unable to find prepared dataset"), False),
    ("loading-model", _rule("close", "loaded", "all model checkpoint weights",
                            pattern=r"(?:model|weights|checkpoint).{0,40}\bloaded\b|\bloaded\b.{0,40}(?:model|weights"
                                    r"|checkpoint)|loading (?:weights|model).{0,20}took"
                                    r"|all model checkpoint weights"), True),
    ("loading-model", _rule("open", "loading", "resuming",
                            pattern=r"loading .{0,40}(?:model|weights|checkpoint|safetensors|shards|pretrained|verifier"
                                    r"|tokenizer|state)|resuming (?:from|training)"), False),
    ("loading-data", _rule("close", "dataset", "shuffle buffer", "samples", "index",
                           pattern=r"dataset.{0,40}\bloaded\b|loaded .{0,20}(?:dataset|samples|examples|data)"
                                   r"|shuffle buffer filled|(?:index|indices).{0,30}built"), True),
    ("loading-data", _rule("open", "dataset", "shuffle buffer", "building index", "scanning", "caching", "indexing",
                           "building train",
                           pattern=r"(?:loading|building|reading|preparing|scanning|indexing) .{0,40}(?:data|index)"
                                   r"|filling (?:up )?shuffle buffer|scanning |caching (?:images|data|labels)"
                                   r"|building train"), False),
    ("rendezvous", _rule("close", "rendezvous complete", "completed store-based barrier", "all ranks joined"), True),
    ("rendezvous", _rule("open", "store based barrier", "store-based barrier", "rendezvous", "waiting for peers",
                         "waiting for all", "waiting for other", "joining the",
                         pattern=r"store.based barrier|rendezvous'?ing"
                                 r"|waiting for .{0,40}(?:rank|peer|node|worker|host)"
                                 r"|joining the .{0,30}rendezvous|rendezvous.{0,20}(?:start|wait)"), False),
    ("initialising", _rule("open", "initializ", "initialis", "nccl info", "setting up", "init process group",
                           pattern=r"initiali[sz]ing (?:distributed|process|model|torch|megatron|cuda|nccl|the|trainer"
                                   r"|deepspeed)|init(?:_| )process(?:_| )group|nccl info .{0,60}init"), False),
    ("uploading", _rule("close", "synced", pattern=r"^wandb: +(?:synced|.{0,4}view run)"), True),
    ("uploading", _rule("open", "uploaded", "upload", "waiting for w&b", "pushing to", "push_to_hub",
                        pattern=r"[\d.]+ ?[kmg]?b of [\d.]+ ?[kmg]?b uploaded|waiting for w&b process to finish"
                                r"|uploading|pushing to (?:the )?hub|syncing run"), False),
    ("generating", _rule("open", "generating", "rollout", "collecting",
                         pattern=r"generating (?:sequences|samples|responses|rollouts|completions)|starting rollout"
                                 r"|collecting rollouts"), False),
    ("training", _rule("open", "running training", "start training", "starting training", "begin training",
                       "training starts", "starting train", "beginning training", "train() called",
                       "before the start of training step"), False),
)  # fmt: skip

# ---- what a bar's caption or unit says it is ----
_BARS: tuple[tuple[PhaseId, str], ...] = (
    ("checkpointing", r"\b(?:saving|writing|dumping)\b|consolidat"),
    ("evaluating", r"\bvalid|\beval|\btest|sanity check|\bpredict|\binference|\bval\b"),
    ("loading-model", r"loading (?:checkpoint|safetensors|pipeline|weights|pt|model)|materiali[sz]ing param"),
    ("compiling", r"captur\w{0,4} .{0,30}graph|compil|autotun|warm.?up"),
    ("uploading", r"\bupload|push"),
    ("downloading", r"download|fetching|\.(?:safetensors|bin|json|pt|gguf|parquet|model|txt|zip|gz|tar|arrow)$"),
    ("tokenising", r"^(?:map|filter|flatten|cast|group)\b|tokeni|preproc|packing|drop(?:ping)? |processing|encod"),
    ("loading-data", r"generating .{0,30}(?:split|examples)|loading|convert|quantiz"
                         r"|resolving|caching|scanning|reading|extract"
                     r"|index|checksum|creating|building|preparing|dataset|shard"),
    ("generating", r"processed prompts|adding requests|generat|rollout|sampling"),
)  # fmt: skip
BAR_PHASES = tuple((phase, re.compile(pattern, re.I)) for phase, pattern in _BARS)

# ---- questions that wait on stdin; looked for in the last lines only ----
PROMPT = re.compile(
    r"\[y/n\]|\(y/n\)|\[yes/no\]|\(yes/no|enter your choice|are you sure.{0,80}\?|press (?:any key|enter)"
    r"|password(?: for [^:]{1,60})?:"
    r"|passphrase|\(pdb\)|ipdb>|^>>>\s*$|paste an api key|username for '"
    r"|enter .{0,40}(?:token|key|code|name).{0,20}[:?]"
    r"|do you (?:wish|want|accept).{0,120}\?|overwrite.{0,60}\?|continue\?"
    r"|token.{0,40}will not be visible|choose .{0,40}:$",
    re.I,
)

# ---- things worth a note ----
NOTES: tuple[Rule, ...] = (
    _rule("tokenizers-fork", "the current process just got forked, after parallelism"),
    _rule("few-workers", "does not have many workers", "suggested max number of worker"),
    _rule("gpu-sync-debug", "cuda_launch_blocking"),
    _rule("recompiles", "recompile_limit", "cache_size_limit", "recompiling function"),
    _rule("grad-overflow", "overflow", pattern=r"overflow.{0,60}(?:skip|loss scale)|gradient overflow"),
    _rule("nan", "nan", pattern=r"\bloss.{0,12}\bnan\b|found nan|nan (?:or inf )?(?:found|detected)"),
    _rule("download-retry", "retrying",
          pattern=r"retrying.{0,60}(?:request|attempt|in [\d.]+|download|\[)|retry \d+/\d"),
    _rule("throttled", "throttl", pattern=r"(?:thermal|power|clock).{0,40}throttl"),
    _rule("lock-wait", "lock", pattern=r"(?:waiting|wait|blocked).{0,40}\block\b|lock.{0,30}(?:held by|not acquired)"),
    _rule("few-steps-warning", "smaller than the logging interval"),
    _rule("cache-flush", "pytorch allocator cache flushes"),
)  # fmt: skip
TRACKERS: tuple[Rule, ...] = (
    _rule("wandb", "wandb:", "wandb.ai"),
    _rule("tensorboard", "tensorboard", "events.out.tfevents"),
    _rule("mlflow", "mlflow"),
    _rule("trackio", "trackio"),
    _rule("comet", "comet ml", "comet_ml", "comet info:"),
    _rule("swanlab", "swanlab"),
    _rule("clearml", "clearml"),
    _rule("neptune", "neptune"),
)  # fmt: skip

SIGNALS = {"SIGHUP": 1, "SIGINT": 2, "SIGILL": 4, "SIGABRT": 6, "SIGBUS": 7, "SIGKILL": 9, "SIGUSR1": 10, "SIGSEGV": 11,
           "SIGUSR2": 12, "SIGPIPE": 13, "SIGTERM": 15}  # fmt: skip
SIGNAL_WORDS = {"killed": 9, "bus error": 7, "segmentation fault": 11, "terminated": 15, "aborted": 6, "hangup": 1}

# ---- keys of metric records: what they give ----
STEP_KEYS = ("global_step", "step", "steps", "iteration", "iter", "num_updates", "current_steps", "trainer/global_step",
             "train/global_step", "_step", "update", "updates", "train_step", "train/step", "global_steps", "n_iter",
             "training/global_step", "it", "batch", "round")  # fmt: skip
TOTAL_KEYS = ("total_steps", "max_steps", "num_training_steps", "total_iters", "max_iters", "num_steps", "train_iters",
              "total", "steps_total")  # fmt: skip
EPOCH_KEYS = ("epoch", "train/epoch", "epochs_done", "current_epoch")
EPOCHS_KEYS = ("num_epochs", "total_epochs", "max_epochs", "epochs")
LOSS_KEYS = ("loss", "train/loss", "train_loss", "train/loss_total", "lm loss", "loss/train", "training_loss",
             "reduced_train_loss", "total_loss", "actor/pg_loss", "training/loss", "avg_loss")  # fmt: skip
RATE_KEYS = ("learning_rate", "lr", "train/lr", "train/learning_rate", "learning rate", "actor/lr")
TOKENS_KEYS = ("tokens_per_s", "tokens_per_second", "tps", "tok/s", "tokens/s", "tok/sec", "tokens_per_sec", "wps",
               "train_tokens_per_second", "throughput", "tokens/train_per_sec_per_gpu", "tokens/s/device")  # fmt: skip
STEP_SECONDS_KEYS = ("step_time", "step_time_s", "time_per_step", "iter_time", "batch_time", "sec_per_step",
                     "seconds_per_step", "timing_s/step", "train_step_timing in s", "step_s", "dt_s", "time/step",
                     "perf/step_time_s", "seconds", "train_time", "s/it", "s/step", "s_per_step")  # fmt: skip
STEP_MS_KEYS = ("step_ms", "step_time_ms", "ms_per_step", "dt_ms", "time_ms", "iter_ms", "time_per_step_ms", "ms/step",
                "elapsed time per iteration (ms)", "step_avg", "dt")  # fmt: skip
DATA_SHARE_KEYS = ("fetch_frac", "data_wait_share", "data_frac", "data_wait_frac", "data_time_frac")
DATA_PERCENT_KEYS = ("data_loading(%)", "time_metrics/data_loading(%)", "data_wait_pct", "data_pct")
DATA_SECONDS_KEYS = ("data_time", "data_wait_s", "data_wait_time_s", "perf/data_wait_time_s", "dataload_time", "data_s",
                     "fetch_s", "time/data", "data_loading_time", "data_wait")  # fmt: skip
DATA_MS_KEYS = ("fetch_ms", "data_ms", "data_time_ms", "profile/fetch_ms", "data_wait_ms")
CLOCK_KEYS = ("elapsed", "elapsed_s", "wall", "elapsed_time", "total_time", "time_elapsed")
STAMP_KEYS = ("ts", "time", "timestamp", "asctime", "_timestamp", "@timestamp", "datetime", "t", "at")
