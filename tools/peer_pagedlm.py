"pagedlm, for tools/peers.py: peer_pagedlm.py [KEYWORDS of `LLM` as JSON]"
import json

from peer_worker import BUDGET, serve, torch_units

from pagedlm.core import SamplingParams
from pagedlm.llm import LLM


def facts(llm):
    "Of the compiled step, the form it was compiled in; of the readable one, what torch uses"
    if type(llm.engine.run).__name__ != "CpuRunner":
        return dict(units=torch_units(), kernels="torch")
    from pagedlm.cpu import FORM
    wide = FORM == "avx512"
    return dict(units=dict(avx2=wide or "avx" in FORM, avx512f=wide, avx512_vnni=wide, avx512_bf16=wide,
                           asimd=FORM == "plain"), kernels=f"compiled, {FORM}")


def load(options="{}"):
    llm = LLM(max_num_batched_tokens=BUDGET, enable_prefix_caching=False, **json.loads(options))

    def run(work, name):
        params = [SamplingParams(temperature=0, max_tokens=r["n"], ignore_eos=True, detokenize=False) for r in work]
        outs = llm.generate([r["prompt"] for r in work], params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outs]

    return facts(llm), run


if __name__ == "__main__":
    serve("pagedlm", load)
