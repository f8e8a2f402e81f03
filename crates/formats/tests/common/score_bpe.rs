//! SentencePiece's BPE in its plainest form, as llama2.c's `encode` has it: join the two neighbours whose joint piece
//! scores highest (the leftmost of equals) until there are none.

use std::collections::HashMap;

pub struct ScoreBpe {
    pub pieces: Vec<(String, f32)>,
    ids: HashMap<String, usize>,
}

impl ScoreBpe {
    /// `pieces` with spaces as U+2581; ids 3..259 are the bytes.
    pub fn new(pieces: Vec<(String, f32)>) -> Self {
        let ids = pieces.iter().enumerate().map(|(i, (p, _))| (p.clone(), i)).collect();
        Self { pieces, ids }
    }

    /// Ids of `text`, begin token first.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        let text = if text.is_empty() { String::new() } else { format!(" {text}").replace(' ', "\u{2581}") };
        for c in text.chars() {
            let mut buffer = [0; 4];
            let c = c.encode_utf8(&mut buffer);
            match self.ids.get(&*c) {
                Some(&id) => ids.push(id),
                None => ids.extend(c.bytes().map(|b| 3 + usize::from(b))),
            }
        }
        loop {
            let mut best: Option<(f32, usize, usize)> = None;
            for i in 1..ids.len() {
                let joint = format!("{}{}", self.pieces[ids[i - 1]].0, self.pieces[ids[i]].0);
                if let Some(&id) = self.ids.get(&joint)
                    && best.is_none_or(|b| self.pieces[id].1 > b.0)
                {
                    best = Some((self.pieces[id].1, i - 1, id));
                }
            }
            let Some((_, at, id)) = best else { break };
            ids[at] = id;
            ids.remove(at + 1);
        }
        [1].into_iter().chain(ids.into_iter().map(|i| i as u32)).collect()
    }
}
