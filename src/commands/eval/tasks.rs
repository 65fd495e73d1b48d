//! Right answers, and answers that are loops or too short.

use super::likeness::json_lines;
use super::{MaterialArgs, Subject};
use crate::commands::terminal::{self, Terminal};
use cactus::engine::Engine;
use cactus::engine::evaluate::metrics::{Interval, bootstrap, mcnemar};
use cactus::engine::evaluate::python::Limits;
use cactus::engine::evaluate::task::{Manner, Outcome, Task, answer};
use cactus::engine::thinking::Think;
use cactus::error::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Tasks with the lines they stand in, and how they are done.
pub struct Questions {
    tasks: Vec<(usize, Task)>,
    manner: Manner,
}

impl Questions {
    /// Reads the files; `None` if none was named.
    pub fn open(args: &MaterialArgs) -> Result<Option<Questions>> {
        let mut tasks = Vec::new();
        for (path, asks) in [(&args.task, true), (&args.prompts, false)] {
            let Some(path) = path else { continue };
            let read = read(path, asks, args.raw)?;
            if read.is_empty() {
                return Err(Error::bad_file(path, "holds no lines"));
            }
            tasks.extend(read);
        }
        if tasks.is_empty() {
            return Ok(None);
        }
        if !args.allow_code && tasks.iter().any(|(_, task)| task.runs_code()) {
            let text = "the task has tests, which means to run code that a model wrote";
            return Err(Error::usage(text).with_hint(
                "give --allow-code if you accept that; it runs as you, with limits on time and memory but not in a sandbox",
            ));
        }
        let limits = Limits { time: Duration::from_secs(u64::from(args.test_timeout)) };
        let manner = Manner { max_tokens: args.max_tokens as usize, think: args.think.parse::<Think>()?.enable(), limits };
        Ok(Some(Questions { tasks, manner }))
    }

    /// Lets a model answer everything.
    pub fn answer(&self, engine: &Engine, subject: &Subject, terminal: &mut Terminal) -> Result<Answers> {
        let mut session = engine.session();
        let mut answers = Vec::with_capacity(self.tasks.len());
        terminal.start(&format!("{}: questions", subject.name), Some(self.tasks.len() as u64), false);
        for (line, task) in &self.tasks {
            let outcome = answer(&mut session, task, &self.manner, &terminal::interrupted);
            answers.push((*line, outcome.map_err(|e| e.context(format!("line {line}")))?));
            terminal.advance(1);
        }
        terminal.finish();
        Ok(Answers(answers))
    }
}

fn read(path: &Path, asks: bool, raw: bool) -> Result<Vec<(usize, Task)>> {
    let task = |(line, value): (usize, Value)| {
        let at = |e: Error| e.context(format!("{}: line {line}", path.display()));
        let task = Task::parse(&value, raw).map_err(at)?;
        match (asks, task.asks()) {
            (true, false) => Err(at(Error::usage("it needs `answer`, `choices` with `answer`, or `test`"))),
            (false, true) => Err(at(Error::usage("a prompt that is only watched has no right answer").with_hint("give --task"))),
            _ => Ok((line, task)),
        }
    };
    json_lines(path)?.into_iter().map(task).collect()
}

/// What a model answered, by line.
pub struct Answers(Vec<(usize, Outcome)>);

/// The figures of the answers.
pub struct Score {
    /// `None` where nothing was asked.
    pub accuracy: Option<Accuracy>,
    pub accuracy_ref: Option<f64>,
    pub flips: Option<Flips>,
    pub written: Option<Habits>,
    pub written_ref: Option<Habits>,
}

pub struct Accuracy {
    pub questions: usize,
    pub right: usize,
    pub interval: Option<Interval>,
    pub timeouts: usize,
}

impl Accuracy {
    pub fn share(&self) -> f64 {
        self.right as f64 / self.questions as f64
    }
}

/// Lines that one of two models answers right and the other does not.
pub struct Flips {
    pub lost: Vec<usize>,
    pub won: Vec<usize>,
}

impl Flips {
    pub fn p(&self) -> f64 {
        mcnemar(self.lost.len(), self.won.len())
    }
}

/// How answers were written.
pub struct Habits {
    pub answers: usize,
    pub short: usize,
    pub looping: usize,
    pub cut: usize,
}

impl Answers {
    fn accuracy(&self) -> Option<Accuracy> {
        let right: Vec<bool> = self.0.iter().filter_map(|(_, outcome)| outcome.right).collect();
        let sums: Vec<(f64, f64)> = right.iter().map(|right| (f64::from(u8::from(*right)), 1.0)).collect();
        (!right.is_empty()).then(|| Accuracy {
            questions: right.len(),
            right: right.iter().filter(|right| **right).count(),
            interval: bootstrap(&sums),
            timeouts: self.0.iter().filter(|(_, outcome)| outcome.timed_out).count(),
        })
    }

    fn habits(&self) -> Option<Habits> {
        let written = || self.0.iter().filter_map(|(_, outcome)| outcome.answer.as_ref());
        (written().count() > 0).then(|| Habits {
            answers: written().count(),
            short: written().filter(|answer| answer.short).count(),
            looping: written().filter(|answer| answer.loops).count(),
            cut: written().filter(|answer| answer.cut).count(),
        })
    }

    /// Figures, beside those of the reference if there is one.
    pub fn score(&self, reference: Option<&Answers>) -> Score {
        let accuracy = self.accuracy();
        let flips = reference.filter(|_| accuracy.is_some()).map(|reference| {
            let pairs = || self.0.iter().zip(&reference.0);
            let lines = |was: bool, is: bool| {
                let flipped = pairs().filter(|((_, new), (_, old))| (old.right, new.right) == (Some(was), Some(is)));
                flipped.map(|((line, _), _)| *line).collect()
            };
            Flips { lost: lines(true, false), won: lines(false, true) }
        });
        Score {
            accuracy,
            accuracy_ref: reference.and_then(Answers::accuracy).map(|accuracy| accuracy.share()),
            flips,
            written: self.habits(),
            written_ref: reference.and_then(Answers::habits),
        }
    }
}

impl Score {
    pub fn to_json(&self) -> Value {
        let mut object = json!({});
        if let Some(accuracy) = &self.accuracy {
            object["accuracy"] = accuracy.share().into();
            object["accuracy_ci"] = json!(accuracy.interval);
            object["questions"] = accuracy.questions.into();
            object["right"] = accuracy.right.into();
            object["timeouts"] = accuracy.timeouts.into();
        }
        if let Some(share) = self.accuracy_ref {
            object["accuracy_ref"] = share.into();
        }
        if let Some(flips) = &self.flips {
            object["flips"] = json!({
                "right_to_wrong": flips.lost.len(), "wrong_to_right": flips.won.len(), "p": flips.p(),
                "right_to_wrong_lines": flips.lost, "wrong_to_right_lines": flips.won,
            });
        }
        let habits = |habits: &Habits| {
            let share = |count: usize| count as f64 / habits.answers as f64;
            json!({
                "answers": habits.answers, "short": share(habits.short), "looping": share(habits.looping),
                "cut": share(habits.cut),
            })
        };
        if let Some(written) = &self.written {
            object["loops"] = habits(written);
        }
        if let Some(written) = &self.written_ref {
            object["loops_ref"] = habits(written);
        }
        object
    }
}
