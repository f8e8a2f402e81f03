//! Writes GGUF bytes, sound or not, for tests.

#[derive(Clone)]
pub struct Builder {
    pub magic: [u8; 4],
    pub version: u32,
    keys: Vec<Vec<u8>>,
    tensors: Vec<(Vec<u8>, Vec<u8>)>,
    data: usize,
}

fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

impl Builder {
    /// No keys, no tensors.
    pub fn empty() -> Self {
        Self { magic: *b"GGUF", version: 3, keys: vec![], tensors: vec![], data: 0 }
    }

    /// A llama with one layer of H = 8 (two heads of 4), MLP 16, V = 4, and a byte-level tokenizer of four tokens.
    pub fn tiny_llama() -> Self {
        let mut b = Self::empty()
            .text("general.architecture", "llama")
            .u32("llama.block_count", 1)
            .u32("llama.context_length", 64)
            .u32("llama.embedding_length", 8)
            .u32("llama.feed_forward_length", 16)
            .u32("llama.attention.head_count", 2)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "gpt-2")
            .texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<e>"])
            .texts("tokenizer.ggml.merges", &["a b"])
            .u32("tokenizer.ggml.eos_token_id", 3);
        for (name, shape) in [
            ("token_embd", &[4u64, 8][..]),
            ("output_norm", &[8]),
            ("blk.0.attn_norm", &[8]),
            ("blk.0.attn_q", &[8, 8]),
            ("blk.0.attn_k", &[8, 8]),
            ("blk.0.attn_v", &[8, 8]),
            ("blk.0.attn_output", &[8, 8]),
            ("blk.0.ffn_norm", &[8]),
            ("blk.0.ffn_gate", &[16, 8]),
            ("blk.0.ffn_up", &[16, 8]),
            ("blk.0.ffn_down", &[8, 16]),
        ] {
            b = b.tensor(&format!("{name}.weight"), shape, 0.5);
        }
        b
    }

    fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        let start = string(key);
        // A later value takes the place of an earlier one.
        self.keys.retain(|k| !k.starts_with(&start));
        self.keys.push([&start[..], &kind.to_le_bytes(), value].concat());
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.keys.retain(|k| !k.starts_with(&string(key)));
        self
    }

    pub fn raw(self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.key(key, kind, value)
    }

    pub fn u32(self, key: &str, v: u32) -> Self {
        self.key(key, 4, &v.to_le_bytes())
    }

    pub fn f32(self, key: &str, v: f32) -> Self {
        self.key(key, 6, &v.to_le_bytes())
    }

    pub fn text(self, key: &str, v: &str) -> Self {
        self.key(key, 8, &string(v))
    }

    pub fn texts(self, key: &str, v: &[&str]) -> Self {
        let items: Vec<u8> = v.iter().flat_map(|s| string(s)).collect();
        let value = [&8u32.to_le_bytes()[..], &(v.len() as u64).to_le_bytes(), &items].concat();
        self.key(key, 9, &value)
    }

    /// An F32 tensor full of `value`; `shape` outermost first.
    pub fn tensor(self, name: &str, shape: &[u64], value: f32) -> Self {
        let n = shape.iter().product::<u64>() as usize;
        self.tensor_of(name, shape, 0, value.to_le_bytes().repeat(n))
    }

    /// A tensor of any type with these bytes.
    pub fn tensor_of(self, name: &str, shape: &[u64], ty: u32, bytes: Vec<u8>) -> Self {
        let offset = self.data as u64;
        self.tensor_at(name, shape, ty, bytes, offset)
    }

    /// A tensor whose table entry claims `offset`.
    pub fn tensor_at(mut self, name: &str, shape: &[u64], ty: u32, mut bytes: Vec<u8>, offset: u64) -> Self {
        let mut entry = string(name);
        entry.extend((shape.len() as u32).to_le_bytes());
        entry.extend(shape.iter().rev().flat_map(|d| d.to_le_bytes()));
        entry.extend(ty.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        self.data += bytes.len();
        self.tensors.push((entry, bytes));
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        self.keys.iter().for_each(|k| out.extend(k));
        self.tensors.iter().for_each(|(t, _)| out.extend(t));
        out.resize(out.len().next_multiple_of(32), 0);
        self.tensors.iter().for_each(|(_, d)| out.extend(d));
        out
    }
}
