# A real transformers Trainer on a tiny random model.
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, i):
        ids = torch.randint(0, 100, (16,))
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    options = TrainingArguments("out", per_device_train_batch_size=2, max_steps=100000, logging_steps=int(sys.argv[1]), report_to=[], use_cpu=True,
                                save_strategy="no", disable_tqdm=sys.argv[2] == "quiet")  # fmt: skip
    Trainer(LlamaForCausalLM(config), options, train_dataset=Tokens()).train()
