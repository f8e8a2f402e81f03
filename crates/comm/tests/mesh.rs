//! Which ranks form which group.

use phalanx_comm::*;
use proptest::prelude::*;

fn shape(pp: usize, dp_replicate: usize, dp_shard: usize, cp: usize, tp: usize, ep: usize) -> MeshShape {
    MeshShape { pp, dp_replicate, dp_shard, cp, tp, ep }
}

/// 24 ranks, counted by hand.
#[test]
fn groups_of_a_mesh_with_every_dimension() {
    let s = shape(2, 1, 3, 2, 2, 4);
    assert_eq!(s.num_ranks().unwrap(), 24);
    assert_eq!(s.efsdp(), 3);
    let at = s.coordinates(17); // 17 = 12 + 5; 5 = 1 · 4 + 0 · 2 + 1
    assert_eq!((at.pp, at.dp_replicate, at.dp_shard, at.cp, at.tp, at.efsdp, at.ep), (1, 0, 1, 0, 1, 1, 1));
    let members = |axis| s.members(axis, 17);
    assert_eq!(members(AxisKind::World), (0..24).collect::<Vec<_>>());
    assert_eq!(members(AxisKind::Pp), [5, 17]);
    assert_eq!(members(AxisKind::DpReplicate), [17]);
    assert_eq!(members(AxisKind::DpShard), [13, 17, 21]);
    assert_eq!(members(AxisKind::Cp), [17, 19]);
    assert_eq!(members(AxisKind::Tp), [16, 17]);
    assert_eq!(members(AxisKind::Dp), [13, 17, 21]);
    assert_eq!(members(AxisKind::Fsdp), [13, 15, 17, 19, 21, 23]);
    assert_eq!(members(AxisKind::Loss), [13, 15, 17, 19, 21, 23]);
    assert_eq!(members(AxisKind::Ep), [16, 17, 18, 19]);
    assert_eq!(members(AxisKind::Efsdp), [13, 17, 21]);
    assert_eq!(members(AxisKind::Edp), [17]);

    let s = shape(1, 2, 2, 1, 2, 2);
    assert_eq!(s.members(AxisKind::Dp, 3), [1, 3, 5, 7]);
    assert_eq!(s.members(AxisKind::Edp, 3), [3, 7]);
    assert_eq!(s.members(AxisKind::DpReplicate, 3), [3, 7]);
    assert_eq!(s.members(AxisKind::Ep, 3), [2, 3]);
    assert_eq!(s.members(AxisKind::Efsdp, 3), [1, 3]);
}

#[test]
fn dimensions_that_do_not_go_together_are_refused_with_the_mend() {
    let e = shape(1, 1, 4, 1, 1, 1).check(8).unwrap_err().to_string();
    assert!(e.contains("= 4, there are 8 ranks") && e.contains("set dp_shard to 8, or run 4 ranks"), "{e}");
    let e = shape(1, 1, 1, 1, 3, 1).check(8).unwrap_err().to_string();
    assert!(e.contains("run 3 ranks, or make the product 8"), "{e}");
    let e = shape(1, 1, 3, 1, 2, 4).check(6).unwrap_err().to_string();
    assert!(e.contains("ep = 4 does not divide dp_shard · cp · tp = 6") && e.contains("1, 2, 3, 6"), "{e}");
    let e = shape(1, 1, 1, 0, 1, 1).check(1).unwrap_err().to_string();
    assert!(e.contains("cp is 0") && e.contains("set cp to 1"), "{e}");
    let e = shape(1, 1, 1, 1, 1, 0).check(1).unwrap_err().to_string();
    assert!(e.contains("ep is 0"), "{e}");
    let e = shape(1 << 40, 1 << 40, 1, 1, 1, 1).check(1).unwrap_err().to_string();
    assert!(e.contains("beyond any number of ranks"), "{e}");
    // No group is made, nobody hangs, and every rank is told.
    let error = run_ranks(3, |comm| Mesh::new(&comm, MeshShape { tp: 2, ..MeshShape::default() })).unwrap_err();
    assert!(error.to_string().contains("there are 3 ranks"), "{error}");
}

#[test]
fn every_group_reduces_over_its_members() {
    let s = shape(1, 2, 2, 1, 2, 4);
    run_ranks(8, |comm| {
        let mesh = Mesh::new(&comm, s)?;
        fn sum<D: Axis>(mesh: &Mesh) -> Result<()> {
            let group = mesh.group::<D>();
            let mut x = [1u64 << group.world_rank()];
            group.all_reduce(ReduceOp::Sum, &mut x)?;
            let members = mesh.shape().members(D::KIND, group.world_rank());
            assert_eq!(x[0], members.iter().map(|r| 1u64 << r).sum(), "{}", group.name());
            assert_eq!(group.members(), members);
            assert_eq!(group.name(), D::KIND.name());
            Ok(())
        }
        sum::<World>(&mesh)?;
        sum::<Pp>(&mesh)?;
        sum::<DpReplicate>(&mesh)?;
        sum::<DpShard>(&mesh)?;
        sum::<Cp>(&mesh)?;
        sum::<Tp>(&mesh)?;
        sum::<Dp>(&mesh)?;
        sum::<Fsdp>(&mesh)?;
        sum::<Loss>(&mesh)?;
        sum::<Ep>(&mesh)?;
        sum::<Efsdp>(&mesh)?;
        sum::<Edp>(&mesh)?;
        // Groups of one (pp, cp, efsdp) are not in the report.
        assert_eq!(mesh.traffic().len(), 9);
        Ok::<_, CommError>(())
    })
    .unwrap();
    assert_eq!(Mesh::solo().unwrap().group::<Dp>().size(), 1);
}

proptest! {
    #[test]
    fn along_every_axis_the_ranks_fall_into_groups_of_the_right_size(
        pp in 1..4usize, rep in 1..4usize, shard in 1..5usize, cp in 1..4usize, tp in 1..4usize, pick in 0..100usize
    ) {
        let inner = shard * cp * tp;
        let divisors: Vec<usize> = (1..=inner).filter(|d| inner % d == 0).collect();
        let ep = divisors[pick % divisors.len()];
        let s = shape(pp, rep, shard, cp, tp, ep);
        let n = s.num_ranks().unwrap();
        let size = |axis| match axis {
            AxisKind::World => n,
            AxisKind::Pp => pp,
            AxisKind::DpReplicate | AxisKind::Edp => rep,
            AxisKind::DpShard => shard,
            AxisKind::Cp => cp,
            AxisKind::Tp => tp,
            AxisKind::Dp => rep * shard,
            AxisKind::Fsdp => shard * cp,
            AxisKind::Loss => rep * shard * cp,
            AxisKind::Ep => ep,
            AxisKind::Efsdp => inner / ep,
        };
        for axis in AxisKind::ALL {
            for rank in 0..n {
                let members = s.members(axis, rank);
                prop_assert_eq!(members.len(), size(axis));
                prop_assert!(members.contains(&rank) && members.is_sorted());
                for &m in &members {
                    prop_assert_eq!(&s.members(axis, m), &members);
                }
            }
        }
        for rank in 0..n {
            let c = s.coordinates(rank);
            prop_assert_eq!((((c.pp * rep + c.dp_replicate) * shard + c.dp_shard) * cp + c.cp) * tp + c.tp, rank);
            prop_assert_eq!((c.pp * rep + c.dp_replicate) * inner + c.efsdp * ep + c.ep, rank);
        }
    }
}
