//! Placing experts, with copies of the busy ones, so that ranks are loaded alike.
//!
//! The greedy algorithm of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, `rebalance_experts`): groups of experts to nodes, copies within each
//! node, copies to its ranks. Where groups do not divide over nodes, the same with one node and one group.

/// The ranks that experts are placed on, and the groups that should stay together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Places for experts on all ranks together, at least as many as there are experts.
    pub replicas: usize,
    /// Groups of neighbouring experts that routers choose from together (`n_group`); 1 where there are none.
    pub groups: usize,
    /// Nodes, between which sending is dear.
    pub nodes: usize,
    /// Ranks on all nodes together.
    pub ranks: usize,
}

/// What cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("placing experts: {0}")]
pub struct PlacementError(String);

/// Where the experts of one layer lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The expert at each place [R]; rank r has the R/M places from r·R/M on.
    pub expert_at: Vec<usize>,
    /// How often each expert is there [E].
    pub copies: Vec<usize>,
}

impl Placement {
    /// The places of an expert, in order.
    pub fn places_of(&self, expert: usize) -> impl Iterator<Item = usize> {
        self.expert_at.iter().enumerate().filter(move |(_, e)| **e == expert).map(|(place, _)| place)
    }
}

/// Places the experts of each layer by their loads [L][E] (tokens of a recent while).
///
/// # Errors
/// If the numbers do not divide, or a load is not a finite number of 0 or more.
pub fn place_experts(loads: &[Vec<f64>], on: Ranks) -> Result<Vec<Placement>, PlacementError> {
    loads.iter().map(|load| layer(load, on)).collect()
}

fn layer(load: &[f64], on: Ranks) -> Result<Placement, PlacementError> {
    let experts = load.len();
    let refuse = |why: String| Err(PlacementError(why));
    if load.iter().any(|l| !(l.is_finite() && *l >= 0.0)) {
        return refuse("a load is not a finite number of 0 or more".into());
    }
    let Ranks { replicas, groups, nodes, ranks } = on;
    let divides = |what: &str, n: usize, by: usize| match by > 0 && n > 0 && n.is_multiple_of(by) {
        true => Ok(()),
        false => Err(PlacementError(format!("{n} {what}, not a multiple of {by}"))),
    };
    divides("experts in groups", experts, groups)?;
    divides("places on ranks", replicas, ranks)?;
    divides("ranks on nodes", ranks, nodes)?;
    if replicas < experts {
        return refuse(format!("{replicas} places for {experts} experts"));
    }
    let (groups, nodes) = if groups.is_multiple_of(nodes) { (groups, nodes) } else { (1, 1) };
    let size = experts / groups;

    // Groups to nodes.
    let of_group: Vec<f64> = load.chunks_exact(size).map(|g| g.iter().sum()).collect();
    let mut expert_at = Vec::with_capacity(replicas);
    let mut copies = vec![0; experts];
    for node in pack(&of_group, nodes) {
        let own: Vec<usize> = node.iter().flat_map(|g| g * size..(g + 1) * size).collect();
        // Copies within the node.
        let (mut counts, mut copied): (Vec<usize>, Vec<usize>) = (vec![1; own.len()], (0..own.len()).collect());
        let share = |counts: &[usize], i: usize| load[own[i]] / counts[i] as f64;
        while copied.len() < replicas / nodes {
            let busiest = (1..own.len()).fold(0, |b, i| if share(&counts, i) > share(&counts, b) { i } else { b });
            counts[busiest] += 1;
            copied.push(busiest);
        }
        // Copies to the ranks of the node.
        let of_copy: Vec<f64> = copied.iter().map(|&i| share(&counts, i)).collect();
        for rank in pack(&of_copy, ranks / nodes) {
            expert_at.extend(rank.iter().map(|&copy| own[copied[copy]]));
        }
        own.iter().zip(&counts).for_each(|(&e, &n)| copies[e] = n);
    }
    Ok(Placement { expert_at, copies })
}

/// Packs weights into `bins` of equally many each: the heaviest first (the lower of equals), into the lightest bin that has room (the lower
/// of equals). One weight a bin is left in order. Gives the indices of each bin.
fn pack(weights: &[f64], bins: usize) -> Vec<Vec<usize>> {
    let each = weights.len() / bins;
    if each == 1 {
        return (0..bins).map(|i| vec![i]).collect();
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    let (mut packed, mut sums) = (vec![Vec::with_capacity(each); bins], vec![0.0; bins]);
    for i in order {
        let room = (0..bins).filter(|&b| packed[b].len() < each);
        let Some(bin) = room.reduce(|a, b| if sums[b] < sums[a] { b } else { a }) else { break };
        packed[bin].push(i);
        sums[bin] += weights[i];
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads() -> Vec<Vec<f64>> {
        vec![
            vec![90.0, 132.0, 40.0, 61.0, 104.0, 165.0, 39.0, 4.0, 73.0, 56.0, 183.0, 86.0],
            vec![20.0, 107.0, 104.0, 64.0, 19.0, 197.0, 187.0, 157.0, 172.0, 86.0, 16.0, 27.0],
        ]
    }

    /// The example of EPLB's README.
    #[test]
    fn the_published_example() {
        let on = Ranks { replicas: 16, groups: 4, nodes: 2, ranks: 8 };
        let got = place_experts(&loads(), on).unwrap();
        assert_eq!(got[0].expert_at, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]);
        assert_eq!(got[1].expert_at, [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]);
        assert_eq!(got[0].places_of(10).collect::<Vec<_>>(), [8, 10]);
    }

    #[test]
    fn every_expert_is_there_and_ranks_are_filled_alike() {
        for (replicas, groups, nodes, ranks) in
            [(12, 1, 1, 3), (12, 4, 2, 4), (18, 4, 3, 6), (24, 3, 1, 2), (12, 12, 1, 12), (60, 2, 2, 4)]
        {
            for p in place_experts(&loads(), Ranks { replicas, groups, nodes, ranks }).unwrap() {
                assert_eq!(p.expert_at.len(), replicas);
                for e in 0..12 {
                    let n = p.places_of(e).count();
                    assert!(n >= 1 && n == p.copies[e], "expert {e}: {p:?}");
                }
            }
        }
        // Nothing known: everything once, in some order.
        let idle = place_experts(&[vec![0.0; 6]], Ranks { replicas: 6, groups: 1, nodes: 1, ranks: 3 }).unwrap();
        assert_eq!(idle[0].copies, [1; 6]);
    }

    #[test]
    fn copies_even_out_what_one_busy_expert_asks() {
        let mut load = vec![1.0; 8];
        load[3] = 100.0;
        let p = &place_experts(&[load.clone()], Ranks { replicas: 16, groups: 1, nodes: 1, ranks: 4 }).unwrap()[0];
        assert_eq!(p.copies[3], 9);
        let of_rank = |r: usize| p.expert_at[r * 4..][..4].iter().map(|&e| load[e] / p.copies[e] as f64).sum::<f64>();
        let (min, max) = (0..4).map(of_rank).fold((f64::MAX, 0f64), |(a, b), x| (a.min(x), b.max(x)));
        assert!(max < 1.5 * min, "{min} to {max}");
    }

    #[test]
    fn numbers_that_do_not_divide_are_refused() {
        let on = |replicas, groups, nodes, ranks| place_experts(&loads(), Ranks { replicas, groups, nodes, ranks });
        for bad in [
            on(16, 5, 1, 4),
            on(15, 4, 2, 4),
            on(16, 4, 3, 8),
            on(8, 4, 2, 8),
            on(16, 0, 1, 4),
            on(16, 4, 0, 4),
            on(0, 4, 2, 4),
        ] {
            assert!(bad.unwrap_err().to_string().contains("placing experts"));
        }
        let nan = place_experts(&[vec![f64::NAN; 4]], Ranks { replicas: 4, groups: 1, nodes: 1, ranks: 2 });
        assert!(nan.unwrap_err().to_string().contains("finite"));
    }
}
