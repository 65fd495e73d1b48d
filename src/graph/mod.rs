//! The computation graph: operations, shapes, planning, execution.
//!
//! A [`Graph`] says what is computed; a [`Plan`] lays it out for at most so many tokens at a time: order,
//! one arena with every intermediate result at a fixed place, kernels chosen. Executing a plan allocates
//! nothing and cannot fail.
//!
//! ```
//! use cactus::graph::{Feed, Graph, Memory, Plan, Run};
//! use cactus::kernels::{Level, Pool};
//!
//! // y = x W^T for the embedding rows x of the ids [1, 0].
//! let mut memory = Memory::default();
//! let mut graph = Graph::default();
//! let table = graph.weight(memory.push_f32("table", &[1.0, 2.0, 3.0, 4.0], 2));
//! let matrix = graph.weight(memory.push_f32("matrix", &[1.0, 1.0, 0.0, 1.0, 2.0, 0.0], 2));
//! let x = graph.embed(&[table])?;
//! let y = graph.matmul(x, matrix, None)?;
//! graph.output(y);
//!
//! let pool = Pool::new(1);
//! let plan = Plan::new(&graph, Level::best(None), 16, pool.threads())?;
//! let (mut buffers, mut state) = (plan.buffers(), graph.state(0, Default::default()));
//! plan.execute(Run { weights: memory.bytes(), feed: Feed::Ids(&[1, 0]), state: &mut state, buffers: &mut buffers, pool: &pool, profile: None });
//! assert_eq!(plan.output(&buffers, 0), [7.0, 4.0, 6.0, 3.0, 2.0, 2.0]);
//! # Ok::<(), cactus::error::Error>(())
//! ```

mod build;
mod execute;
mod op;
mod plan;
mod profile;
pub mod reference;
mod state;
mod tensor;

pub use build::Graph;
pub use execute::{Batch, Feed, Run, Sequence};
pub use op::{NodeId, Op, RopeTable, WeightId};
pub use plan::{Buffers, Plan};
pub use profile::Profile;
pub use state::{CacheFormat, State};
pub use tensor::{Memory, Weight};
