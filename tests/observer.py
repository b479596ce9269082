"""One rank of a run, watched: `torchrun tests/observer.py RECIPE ANSWER key=value ...`

Nothing of the run is changed. Before its model folder is written, rank 0 holds every frozen weight against the files of the
base, bit by bit, and every trained one against what it was before the first step.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from deepseek_ft import adapters, export, finetune, models, ranks


def main(recipe: str, answer: str, overrides: list[str]) -> None:
    begun, attach, save = {}, adapters.attach, export.save_model_folder

    def attached(model, config, plan, source, *more):
        model = attach(model, config, plan, source, *more)
        begun.update({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        begun["base"] = source, models.load_dtype(config, plan)
        return model

    def saved(trainer, tokenizer, folder):
        if trainer.plan.strategy.stage == 3:
            trainer.model_wrapped.empty_partition_cache()
        look(trainer.model)
        save(trainer, tokenizer, folder)

    def look(model):
        from transformers import AutoModelForCausalLM
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # load a plain model beside ZeRO's

        found = {"changed_base": [], "trained": {}}
        parameters = dict(model.named_parameters())
        with ranks.whole(list(parameters.values())):
            if os.environ.get("RANK", "0") == "0":
                unset_hf_deepspeed_config()
                source, dtype = begun.pop("base")
                base = dict(AutoModelForCausalLM.from_pretrained(source, dtype=dtype).named_parameters())
                frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
                for name, parameter in frozen.items():
                    own = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")
                    if not torch.equal(parameter, base.pop(own)):
                        found["changed_base"].append(own)
                found["left"] = sorted(base)  # weights of the base that are not frozen in the run
                for name, before in begun.items():
                    found["trained"][name] = {"moved": not torch.equal(parameters[name], before.to(parameters[name].dtype)),
                                              "dtype": str(parameters[name].dtype)}  # fmt: skip
                with open(answer, "w") as file:
                    json.dump(found, file)

    adapters.attach, export.save_model_folder = attached, saved
    finetune(recipe, overrides)


if __name__ == "__main__":
    words = [w for w in sys.argv[1:] if not w.startswith("--local_rank")]
    main(words[0], words[1], words[2:])
