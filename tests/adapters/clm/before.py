"""Trains a causal language model on a text file by Hugging Face Trainer, in the form of Hugging Face's `run_clm.py`."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import chain

import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_type: str = field(default="gpt2", metadata={"help": "Kind of the model, which begins untrained."})
    config_overrides: str = field(default="", metadata={"help": "As in n_embd=32,n_layer=2."})
    tokenizer_name: str = field(default="", metadata={"help": "Folder of the tokenizer."})


@dataclass
class DataArguments:
    train_file: str = field(default="", metadata={"help": "A text file to train on."})
    validation_file: str = field(default="", metadata={"help": "A text file to evaluate on."})
    block_size: int = field(default=16, metadata={"help": "Tokens of a sample."})


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)])
    logger.setLevel(training_args.get_process_log_level())
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    logger.warning(f"Process {training_args.local_process_index} on {training_args.device}")

    set_seed(training_args.seed)

    config = CONFIG_MAPPING[model_args.model_type]()
    config.update_from_string(model_args.config_overrides)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def blocks(path):
        with open(path) as file:
            tokens = list(chain(*tokenizer(file.read().splitlines())["input_ids"]))
        size = data_args.block_size
        cut = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
        return [{"input_ids": block, "labels": list(block)} for block in cut]

    with training_args.main_process_first(desc="tokenization"):
        train_dataset = blocks(data_args.train_file)
        eval_dataset = blocks(data_args.validation_file) if training_args.do_eval else None

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.create_model_card()


if __name__ == "__main__":
    main()
