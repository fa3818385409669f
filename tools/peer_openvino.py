"OpenVINO GenAI, for tools/peers.py: peer_openvino.py MODEL, an exported folder or a .gguf file"
import numpy as np
import openvino as ov
import openvino_genai as og
from openvino import opset13 as ops
from peer_worker import BUDGET, KV_GB, THREADS, serve


def units():
    "Ask a small compiled model which kernels it got: unit -> whether one is made for it"
    x = ops.parameter([64, 64], np.float32)
    compiled = ov.Core().compile_model(ov.Model([ops.softmax(ops.gelu(x, "erf"), 1)], [x]), "CPU")
    nodes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    kinds = " ".join(sorted({node["primitiveType"].get() for node in nodes if node["primitiveType"].get()[0] != "u"}))
    return dict(avx2="avx2" in kinds or "avx512" in kinds, avx512f="avx512" in kinds, asimd="asimd" in kinds), kinds


def load(model):
    config = og.SchedulerConfig()
    config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = KV_GB, BUDGET, 64
    config.dynamic_split_fuse, config.enable_prefix_caching = True, False
    pipe = og.ContinuousBatchingPipeline(model, config, "CPU", dict(INFERENCE_NUM_THREADS=THREADS))
    number = iter(range(10**9))

    def run(work, name):
        handles = []
        for r in work:
            greedy = og.GenerationConfig(max_new_tokens=r["n"], ignore_eos=True, do_sample=False)
            ids = ov.Tensor(np.array([r["prompt"]], np.int64))
            handles.append(pipe.add_request(next(number), ids, greedy))
        while pipe.has_non_finished_requests():
            pipe.step()
        return [list(h.read_all()[0].generated_ids) for h in handles]

    found, kinds = units()
    return dict(units=found, kernels=kinds), run


if __name__ == "__main__":
    serve("openvino-genai", load)
