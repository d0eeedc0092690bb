"""A workload in a few figures, and in one line."""

from megatron_ext.workload.workload import Workload, fingerprint


def summary(workload: Workload) -> dict:
    """The main figures of a workload, by name."""
    return {
        "parameters": sum(p.numel for chunk in workload.chunks for p in chunk.parameters),
        "bytes": sum(chunk.bytes for chunk in workload.chunks),
        "chunks": len(workload.chunks),
        "num_microbatches": workload.parallel.num_microbatches,
        "ramp": workload.ramp,
        "fingerprint": fingerprint(workload),
    }


def not_counted(workload: Workload) -> str | None:
    """Text that says of which chunks with parameters the activations are not known; None if they are known of all."""
    chunks = [chunk for chunk in workload.chunks if chunk.parameters]
    missing = [f"rank {each.pp_rank} chunk {each.model_chunk_id}" for each in chunks if not each.activation_bytes]
    of = f" of {', '.join(missing)}" if len(missing) < len(chunks) else ""
    return f"activations{of} are not counted" if missing else None


def text(workload: Workload, path) -> str:
    """The workload in one line for people."""
    figures, p = summary(workload), workload.parallel
    sizes = f"PP {p.pp} x VP {p.vp} x DP {p.data_parallel_size}"
    sizes += f" in {p.instances} instances of the optimizer" if p.instances > 1 else ""
    if workload.experts is not None:
        sizes += f", {workload.experts.num_experts} experts over EP {p.ep} x ETP {p.etp}, sharded among {p.expert_dp}"
    ramp = f" (before: {', '.join(map(str, workload.ramp))})" if workload.ramp else ""
    held = f"{figures['parameters']:,} parameters ({figures['bytes'] / 2**20:.1f} MiB) in {figures['chunks']} chunks"
    tp = p.tensor_model_parallel_size
    held += f" of one of {tp} tensor-parallel ranks" if tp > 1 else ""
    run = f"{sizes}, {p.num_microbatches} micro-batches{ramp}, {p.order}, zero stage {workload.zero_stage}"
    return f"{path}: {held}; {run}"
