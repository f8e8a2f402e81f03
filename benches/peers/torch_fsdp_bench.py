#!/usr/bin/env python3
"""The same training step under PyTorch's FSDP2 over gloo, one process a rank: the peer of `phalanx bench train --ranks N`.

    torchrun --nproc-per-node 2 benches/peers/torch_fsdp_bench.py --shape smol-135m --batch 4 --seq 512 --threads 1

`--batch` counts the sequences of all ranks together, `--threads` is for each rank. Rank 0 prints one JSON line, with the fields of torch_train_bench.py.
Needs: pip install torch numpy transformers
"""
import argparse, json, resource, statistics, time

from torch_train_bench import SHAPES


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--shape", choices=SHAPES, default="smol-135m")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(a.threads)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    h, layers, heads, kv, hd, inter, vocab, tied = SHAPES[a.shape]
    cfg = Qwen3Config(hidden_size=h, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                      head_dim=hd, intermediate_size=inter, vocab_size=vocab, tie_word_embeddings=tied,
                      max_position_embeddings=max(2048, a.seq), attn_implementation="sdpa", use_cache=False)
    model = Qwen3ForCausalLM(cfg).train()
    n = sum(p.numel() for p in model.parameters())
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (a.batch, a.seq), generator=g)[rank::world]
    times, losses = [], []
    for i in range(a.warmup + a.steps):
        dist.barrier()
        t = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        dist.barrier()
        dt = time.perf_counter() - t
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if i >= a.warmup:
            times.append(dt)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024])
    dist.all_reduce(peak)
    if rank == 0:
        med, tok = statistics.median(times), a.batch * a.seq
        attn = 6 * layers * heads * hd * a.seq
        print(json.dumps({
            "peer": f"torch {torch.__version__} FSDP2 over gloo", "shape": a.shape, "params": n, "dtype": "f32", "ranks": world,
            "threads": a.threads * world, "batch": a.batch, "seq": a.seq, "step_s": round(med, 4), "tokens_per_s": round(tok / med, 1),
            "model_gflops": round((6 * n + attn) * tok / med / 1e9, 1), "peak_rss_mib": int(peak.item()),
            "loss_first": round(losses[0], 4), "loss_last": round(losses[-1], 4)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
