//! A mesh: the ranks of a world as a box with named axes, and one typed group along each.
//!
//! # Why types
//! Nothing about a slice of numbers tells over which ranks it is to be summed, and summing over the wrong ones gives numbers
//! that look right. So a function that reduces asks for the group by type; another one does not compile:
//!
//! ```compile_fail,E0308
//! use phalanx_comm::{CommError, Dp, Group, ReduceOp, Tp};
//! fn sum_gradients(group: &Group<Dp>, gradients: &mut [f32]) -> Result<(), CommError> {
//!     group.all_reduce(ReduceOp::Sum, gradients)
//! }
//! fn step(tp: &Group<Tp>, gradients: &mut [f32]) -> Result<(), CommError> {
//!     sum_gradients(tp, gradients) // expected `&Group<Dp>`, found `&Group<Tp>`
//! }
//! ```
//!
//! ```
//! use phalanx_comm::{CommError, Dp, Fsdp, Group, Mesh, MeshShape, ReduceOp, run_ranks};
//! fn sum_gradients(group: &Group<Dp>, gradients: &mut [f32]) -> Result<(), CommError> {
//!     group.all_reduce(ReduceOp::Sum, gradients)
//! }
//! let shape = MeshShape { dp_replicate: 2, dp_shard: 2, tp: 2, ..MeshShape::default() };
//! let sums = run_ranks(8, |comm| {
//!     let mesh = Mesh::new(&comm, shape)?;
//!     let mut gradients = [comm.rank() as f32];
//!     sum_gradients(mesh.group::<Dp>(), &mut gradients)?;
//!     assert_eq!(mesh.group::<Fsdp>().size(), 2);
//!     Ok::<_, CommError>(gradients[0])
//! })?;
//! // Ranks 0, 2, 4, 6 hold one piece of every layer, ranks 1, 3, 5, 7 the other.
//! assert_eq!(sums, [12., 16., 12., 16., 12., 16., 12., 16.]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod shape;

use std::marker::PhantomData;
use std::ops::Deref;

pub use shape::{AxisKind, Coordinates, MeshShape};

use crate::communicator::Communicator;
use crate::error::Result;
use crate::traffic::Traffic;

mod sealed {
    use super::{Axis, Group, Groups};
    pub trait Sealed: Sized {
        fn of(groups: &Groups) -> &Group<Self>
        where
            Self: Axis;
    }
}

/// An axis as a type. Sealed; the types are in this module.
pub trait Axis: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The axis as a value.
    const KIND: AxisKind;
}

macro_rules! axes {
    ($($(#[$doc:meta])* $name:ident $field:ident),* $(,)?) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $name;
            impl sealed::Sealed for $name {
                fn of(groups: &Groups) -> &Group<$name> {
                    &groups.$field
                }
            }
            impl Axis for $name {
                const KIND: AxisKind = AxisKind::$name;
            }
        )*

        /// One group an axis.
        #[derive(Clone, Debug)]
        pub struct Groups {
            $($field: Group<$name>,)*
        }

        impl Groups {
            fn new(world: &Communicator, shape: &MeshShape) -> Result<Groups> {
                // In the order of `AxisKind::ALL` on every rank.
                Ok(Groups { $($field: Group::new(world, shape)?,)* })
            }

            fn all(&self) -> Vec<(AxisKind, &Communicator)> {
                vec![$((AxisKind::$name, &*self.$field)),*]
            }
        }
    };
}

axes! {
    /// All ranks.
    World world,
    /// Pipeline stages: activations go from one to the next.
    Pp pp,
    /// Replicas: gradients are summed over them after they were reduced within the replica.
    DpReplicate dp_replicate,
    /// Shards within a replica.
    DpShard dp_shard,
    /// Pieces of the same sequences: attention exchanges keys and values.
    Cp cp,
    /// Pieces of the same layers: their outputs are summed or gathered.
    Tp tp,
    /// All ranks that see different data: dp_replicate × dp_shard.
    Dp dp,
    /// Ranks that dense parameters are sharded over: dp_shard × cp.
    Fsdp fsdp,
    /// Ranks that hold different tokens: losses and counts are summed over dp_replicate × dp_shard × cp.
    Loss loss,
    /// Ranks that hold different experts: tokens are exchanged.
    Ep ep,
    /// Ranks that the same experts' parameters are sharded over.
    Efsdp efsdp,
    /// Replicas of the experts: their gradients are summed over them.
    Edp edp,
}

/// The group of a rank along one axis: a [`Communicator`] whose type says what it is for.
///
/// In a group of one every collective returns at once, moves nothing that need not be moved, and counts no traffic.
#[derive(Clone, Debug)]
pub struct Group<D: Axis> {
    comm: Communicator,
    axis: PhantomData<D>,
}

impl<D: Axis> Group<D> {
    fn new(world: &Communicator, shape: &MeshShape) -> Result<Group<D>> {
        let comm = world.subgroup(D::KIND.name(), &shape.members(D::KIND, world.rank()))?;
        Ok(Group { comm, axis: PhantomData })
    }

    /// The group without its type, for what works on any group.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }
}

impl<D: Axis> Deref for Group<D> {
    type Target = Communicator;
    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

/// The groups of one rank along all axes.
#[derive(Clone, Debug)]
pub struct Mesh {
    shape: MeshShape,
    at: Coordinates,
    groups: Groups,
}

impl Mesh {
    /// Makes all groups of this rank. Every rank of `world` makes the same call.
    ///
    /// # Errors
    /// If the dimensions do not go together or do not make up the world; no group is made then.
    pub fn new(world: &Communicator, shape: MeshShape) -> Result<Mesh> {
        shape.check(world.size())?;
        let groups = Groups::new(world, &shape)?;
        Ok(Mesh { shape, at: shape.coordinates(world.rank()), groups })
    }

    /// The mesh of a single rank.
    ///
    /// # Errors
    /// None in practice: a mesh of one rank has nothing that could not go together.
    pub fn solo() -> Result<Mesh> {
        Mesh::new(&Communicator::solo(), MeshShape::default())
    }

    /// The dimensions.
    pub fn shape(&self) -> MeshShape {
        self.shape
    }

    /// Where this rank lies.
    pub fn coordinates(&self) -> Coordinates {
        self.at
    }

    /// This rank's group along an axis: `mesh.group::<Dp>()`.
    pub fn group<D: Axis>(&self) -> &Group<D> {
        D::of(&self.groups)
    }

    /// What this rank sent in each group of more than one rank, and where its time went.
    pub fn traffic(&self) -> Vec<(AxisKind, Traffic)> {
        self.groups.all().into_iter().filter(|(_, c)| c.size() > 1).map(|(axis, c)| (axis, c.traffic())).collect()
    }
}
