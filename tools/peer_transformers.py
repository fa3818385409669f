"""transformers, for tools/peers.py: peer_transformers.py FOLDER DTYPE static|continuous

static: one padded batch, everybody waits for the longest answer. continuous: its own paged batching.
"""
import torch
from peer_worker import BUDGET, THREADS, serve, torch_units
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def static(model):
    "One batch, padded on the left"
    def run(work, name):
        longest, n_new = max(len(r["prompt"]) for r in work), max(r["n"] for r in work)
        ids, mask = torch.full((2, len(work), longest), model.config.eos_token_id)
        mask.zero_()
        for i, r in enumerate(work):
            ids[i, longest - len(r["prompt"]):] = torch.tensor(r["prompt"])
            mask[i, longest - len(r["prompt"]):] = 1
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=n_new, min_new_tokens=n_new,
                                 do_sample=False)
        return [row[longest:longest + r["n"]].tolist() for row, r in zip(out, work)]

    return run


def continuous(model):
    "Its manager, kept from run to run"
    how = ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=BUDGET, allow_block_sharing=False)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=model.config.eos_token_id)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=how)
    manager.start()

    def run(work, name):
        ids = {manager.add_request(r["prompt"], max_new_tokens=r["n"]): i for i, r in enumerate(work)}
        outs = [None] * len(work)
        while ids:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outs[ids.pop(result.request_id)] = result.generated_tokens
        return outs

    return run


def load(folder, dtype, kind):
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return dict(units=torch_units()), dict(static=static, continuous=continuous)[kind](model)


if __name__ == "__main__":
    serve("transformers", load)
