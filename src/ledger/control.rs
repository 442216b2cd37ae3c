//! The control log: commands to all workers of a job, as create-once records. The last command is
//! the one in force.

use super::Ledger;
use super::error::{LedgerError, Result};
use super::job::JobLimits;
use super::keys::Id;
use super::order::{ControlRecord, Extension, JobCommand, LimitsFrom, PinOrder, Price, StopWhy};
use super::record::{decode, read};
use super::store::CreateOutcome;

/// Maximum number of commands in one job: people do not give more.
const MAX_COMMANDS: usize = 100_000;

/// Maximum bytes of notes and other texts in all commands together.
const MAX_COMMAND_BYTES: usize = 64 << 20;

/// The control log of a job, as far as it was read.
#[derive(Debug, Clone)]
pub struct ControlLog {
    ledger: Ledger,
    commands: Vec<JobCommand>,
    /// The generation that each command was given to.
    generations: Vec<u32>,
    /// Bytes of text in all commands together, as bounded by [`MAX_COMMAND_BYTES`].
    bytes: usize,
}

/// Result of [`Ledger::stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopOutcome {
    Stopped,
    AlreadyStopped,
    AlreadyFinished,
}

impl Ledger {
    /// Stops the job, unless it is finished or already stopped for this reason. `close`: its
    /// workers publish the unfinished rows as `cancelled` or `expired`.
    pub async fn stop(&self, why: StopWhy, close: bool) -> Result<StopOutcome> {
        if self.finish_check(None).await?.is_some() {
            return Ok(StopOutcome::AlreadyFinished);
        }
        let mut control = self.control().await?;
        loop {
            if control.stop_reason() == Some(why) && (control.is_closing() || !close) {
                return Ok(StopOutcome::AlreadyStopped);
            }
            // If another process has written a command in the meantime, that command is read first.
            if control.try_append(JobCommand::stop(why, close)).await? {
                return Ok(StopOutcome::Stopped);
            }
        }
    }

    /// Reads the control log.
    pub async fn control(&self) -> Result<ControlLog> {
        let mut control = ControlLog {
            ledger: self.clone(),
            commands: Vec::new(),
            generations: Vec::new(),
            bytes: 0,
        };
        control.refresh().await?;
        Ok(control)
    }

    /// The limits in force: those of the job, overridden by each `Extend` in turn.
    pub fn limits(&self, control: &ControlLog) -> JobLimits {
        with_extensions(self.job().limits(), control.commands())
    }

    /// The limits in force now. Reads all commands again: one request per command and one more.
    pub async fn current_limits(&self) -> Result<JobLimits> {
        Ok(self.limits(&self.control().await?))
    }

    /// The limits of the job file, as of the last time `run` or `submit` found them changed.
    pub fn job_file_limits(&self, control: &ControlLog) -> JobLimits {
        let is_from_job_file = |command: &JobCommand| matches!(command, JobCommand::Extend(extend) if extend.from == Some(LimitsFrom::JobFile));
        let last = control.commands().iter().rposition(is_from_job_file);
        // A changed file replaces all limits, so the limits right after that command are the
        // file's.
        with_extensions(
            self.job().limits(),
            &control.commands()[..last.map_or(0, |last| last + 1)],
        )
    }
}

/// `limits` overridden by these commands.
fn with_extensions(mut limits: JobLimits, commands: &[JobCommand]) -> JobLimits {
    for command in commands {
        if let JobCommand::Extend(extend) = command {
            limits.usd = extend.budget_usd;
            limits.deadline_seconds = extend.deadline_seconds;
            limits.unfinished = extend.unfinished.unwrap_or(limits.unfinished);
            limits.usd_per_hour = extend.price.map_or(limits.usd_per_hour, |price| price.usd_per_hour);
        }
    }
    limits
}

impl ControlLog {
    /// Reads the commands given since the last reading: one request if there are none. Returns the
    /// command in force.
    pub async fn refresh(&mut self) -> Result<Option<&JobCommand>> {
        loop {
            let key = self.ledger.keys().control(self.commands.len() as u32);
            match read::<ControlRecord>(self.ledger.store(), &key).await? {
                Some(record) => self.apply(record, &key)?,
                None => return Ok(self.current_command()),
            }
        }
    }

    /// The command in force, as of the last reading: the last command, skipping stops of an earlier
    /// generation and commands that only pin an input.
    pub fn current_command(&self) -> Option<&JobCommand> {
        let current_generation = self.ledger.generation();
        let mut newest_first = self.commands.iter().zip(&self.generations).rev();
        newest_first
            .find(|(command, generation)| match command {
                JobCommand::Extend(_) => true,
                JobCommand::Stop { .. } => **generation >= current_generation,
                JobCommand::Pin(_) => false,
            })
            .map(|(command, _)| command)
    }

    /// Whether the command in force is a stop that closes the job: unfinished rows become expired
    /// or cancelled.
    pub fn is_closing(&self) -> bool {
        matches!(self.current_command(), Some(JobCommand::Stop { close: true, .. }))
    }

    /// Why the job is stopped, if it is.
    pub fn stop_reason(&self) -> Option<StopWhy> {
        match self.current_command() {
            Some(JobCommand::Stop { why, .. }) => Some(*why),
            _ => None,
        }
    }

    /// The note of the stop in force, if it has one.
    pub fn stop_note(&self) -> Option<&str> {
        match self.current_command() {
            Some(JobCommand::Stop { note, .. }) => note.as_deref(),
            _ => None,
        }
    }

    /// Inputs that were pinned to a new ETag, oldest first.
    pub fn pins(&self) -> impl Iterator<Item = &PinOrder> {
        self.commands.iter().filter_map(|command| match command {
            JobCommand::Pin(pin) => Some(pin),
            JobCommand::Stop { .. } | JobCommand::Extend(_) => None,
        })
    }

    /// Records that an input has the planned bytes under another ETag, unless an earlier command
    /// records it already.
    pub async fn record_pin(&mut self, pin: PinOrder) -> Result<()> {
        while !self.pins().any(|known| *known == pin) {
            self.try_append(JobCommand::Pin(pin.clone())).await?;
        }
        Ok(())
    }

    /// All commands, oldest first.
    pub fn commands(&self) -> &[JobCommand] {
        &self.commands
    }

    /// The source of the limits in force. `None`: the last `Extend` names no source.
    pub fn limits_source(&self) -> Option<LimitsFrom> {
        let last = self.commands.iter().rev().find_map(|command| match command {
            JobCommand::Extend(extend) => Some(extend.from),
            JobCommand::Stop { .. } | JobCommand::Pin(_) => None,
        });
        // A job begins with the limits of its file.
        last.unwrap_or(Some(LimitsFrom::JobFile))
    }

    /// The command that replaces the limits in force by `wanted`.
    pub fn extend_command(&self, wanted: &JobLimits, from: Option<LimitsFrom>) -> JobCommand {
        let current = self.ledger.limits(self);
        let price = Price {
            usd_per_hour: wanted.usd_per_hour,
        };
        JobCommand::Extend(Extension {
            budget_usd: wanted.usd,
            deadline_seconds: wanted.deadline_seconds,
            unfinished: (wanted.unfinished != current.unfinished).then_some(wanted.unfinished),
            price: (wanted.usd_per_hour != current.usd_per_hour).then_some(price),
            from,
        })
    }

    /// Appends a command. Returns false if another process appended one first: the caller must then
    /// decide anew from the command now in force (the budget may have been extended in between).
    pub async fn try_append(&mut self, command: JobCommand) -> Result<bool> {
        let index = self.commands.len() as u32;
        let key = self.ledger.keys().control(index);
        let record = ControlRecord {
            v: command.min_version(),
            job: self.ledger.job().job.clone(),
            index,
            nonce: Id::random()?,
            generation: self.ledger.generation(),
            command,
        };
        let bytes = self.ledger.encode_signed(&key, &record)?;
        match self.ledger.store().create(&key, bytes).await? {
            CreateOutcome::Ours => {
                self.generations.push(record.generation);
                self.commands.push(record.command);
                Ok(true)
            }
            CreateOutcome::Theirs(bytes) => {
                self.apply(decode(self.ledger.store(), &key, &bytes)?, &key)?;
                self.refresh().await?;
                Ok(false)
            }
        }
    }

    /// Checks a record that was read from `key`, and adds its command.
    fn apply(&mut self, record: ControlRecord, key: &str) -> Result<()> {
        let is_expected = record.job == self.ledger.job().job && record.index as usize == self.commands.len();
        let address = || self.ledger.store().address(key);
        if !is_expected {
            return Err(LedgerError::damaged(format!(
                "`{}` is not an order for this job",
                address()
            )));
        }
        self.bytes += record.command.text_bytes();
        if self.commands.len() >= MAX_COMMANDS || self.bytes > MAX_COMMAND_BYTES {
            return Err(LedgerError::damaged(format!(
                "`{}` is one command too many: {} commands have {} bytes of text",
                address(),
                self.commands.len() + 1,
                self.bytes
            )));
        }
        self.generations.push(record.generation);
        self.commands.push(record.command);
        Ok(())
    }
}
