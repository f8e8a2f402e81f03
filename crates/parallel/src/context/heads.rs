//! Which heads each rank works on when rows are exchanged for heads.

use phalanx_nn::{NnError, Result};

/// The heads of Q, or of K and V, that each rank of a group works on; every rank has as many.
pub(super) struct Heads {
    /// Heads of the whole.
    pub total: usize,
    /// By rank. A head may be at several ranks.
    pub of: Vec<Vec<usize>>,
}

impl Heads {
    /// Heads of Q and of K/V, N and K of them, for `ranks` ranks.
    ///
    /// Each rank gets N / P consecutive query heads and the key/value heads that these share, s = gcd(N / P, N / K) query heads for each: K / P of
    /// them where P divides K; where P is more, a head is at several ranks.
    ///
    /// # Errors
    /// If the query heads cannot be dealt evenly.
    pub fn deal(query: usize, kv: usize, ranks: usize) -> Result<(Heads, Heads)> {
        if query == 0 || kv == 0 || !query.is_multiple_of(kv) || !query.is_multiple_of(ranks) {
            let fits: Vec<String> = (1..=query).filter(|p| query.is_multiple_of(*p)).map(|p| p.to_string()).collect();
            return Err(NnError::Parallel(format!(
                "context: ulysses: {query} query heads ({kv} key/value heads) cannot be dealt evenly to {ranks} ranks; \
                 choose a number of ranks among {}, or `context: ring`",
                fits.join(", ")
            )));
        }
        let (each, group) = (query / ranks, query / kv);
        let share = gcd(each, group);
        let queries = (0..ranks).map(|r| (r * each..(r + 1) * each).collect()).collect();
        let keys = (0..ranks).map(|r| (0..each / share).map(|j| (r * each + j * share) / group).collect()).collect();
        Ok((Heads { total: query, of: queries }, Heads { total: kv, of: keys }))
    }

    /// Heads of each rank.
    pub fn each(&self) -> usize {
        self.of.first().map_or(0, Vec::len)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_head_is_with_its_key_head() {
        for kv in 1..7 {
            for group in 1..7 {
                let n: usize = kv * group;
                for ranks in (1..=n).filter(|p| n.is_multiple_of(*p)) {
                    let (q, k) = Heads::deal(n, kv, ranks).unwrap();
                    let share = q.each() / k.each();
                    for (queries, keys) in q.of.iter().zip(&k.of) {
                        for (j, head) in queries.iter().enumerate() {
                            assert_eq!(keys[j / share], head / group, "{n}/{kv} heads over {ranks}");
                        }
                    }
                    if kv.is_multiple_of(ranks) {
                        assert_eq!(k.each(), kv / ranks, "nothing is sent twice");
                    }
                }
            }
        }
        let refused = Heads::deal(12, 4, 5).err().unwrap().to_string();
        assert!(refused.contains("12 query heads") && refused.contains("1, 2, 3, 4, 6, 12"), "{refused}");
    }
}
