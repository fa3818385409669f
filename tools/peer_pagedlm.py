"pagedlm, for tools/peers.py: peer_pagedlm.py [KEYWORDS of `LLM` as JSON]"
import json

from peer_worker import BUDGET, serve, torch_units

from pagedlm.core import SamplingParams
from pagedlm.llm import LLM


def load(options="{}"):
    llm = LLM(max_num_batched_tokens=BUDGET, enable_prefix_caching=False, **json.loads(options))

    def run(work, name):
        params = [SamplingParams(temperature=0, max_tokens=r["n"], ignore_eos=True) for r in work]
        outs = llm.generate([r["prompt"] for r in work], params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outs]

    return dict(units=torch_units()), run


if __name__ == "__main__":
    serve("pagedlm", load)
