//! Workloads: arrivals with their classes, and what makes them come.

use std::path::Path;
use std::sync::Arc;

use kvrelay_core::request::{Arrival, ClassId, PromptContent, Scheduled, Source};
use kvrelay_core::time::{Nanos, Time};

use crate::arrivals::{Process, arrival_times, checked_time};
use crate::closed::{Pace, Turn, TurnSource, UserSource};
use crate::error::{MAX_TOKENS, WorkloadError, positive};
use crate::intensity::{Extent, Intensity, varying_arrival_times};
use crate::lengths::LengthPair;
use crate::preset::Preset;
use crate::record::{Class, Record};
use crate::trace::{self, TraceOptions};

/// A list of arrivals.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The arrivals; at least one, in time order. Where one waits for a completion its time is only
    /// the earliest that it could come: see [`Workload::waits`].
    pub arrivals: Vec<Arrival>,
    /// Names of the classes, by [`ClassId`]; no two alike.
    pub class_names: Vec<String>,
    /// What it is, in a line.
    pub description: String,
    /// What it is made after, if it has a name: a preset, a trace.
    origin: String,
    /// The seed of everything made up in it, and of what an engine makes up to run it.
    pub seed: u64,
    /// What was noticed and put right, or may surprise.
    pub warnings: Vec<String>,
    classes: Vec<Class>,
    pace: Pace,
}

/// What made-up workloads have in common, apart from their arrivals.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthetic {
    /// How many requests.
    pub num_requests: usize,
    /// Their lengths.
    pub lengths: LengthPair,
    /// Their class.
    pub class: Class,
    /// The seed.
    pub seed: u64,
}

impl Workload {
    /// Requests that arrive by a process of `rate` per second.
    ///
    /// # Errors
    /// [`WorkloadError`], when the rate, the process or the number of requests is out of range.
    pub fn synthetic(process: Process, rate: f64, what: &Synthetic) -> Result<Workload, WorkloadError> {
        let times = arrival_times(process, rate, what.num_requests, what.seed)?;
        let law = match process {
            Process::Poisson => "Poisson".to_owned(),
            Process::Gamma { cv } => format!("gamma (cv {cv})"),
            Process::Fixed => "evenly spaced".to_owned(),
        };
        let description = format!("{} requests, {law} at {rate} req/s, {}", what.num_requests, what.lengths);
        let records = made_up(&times, &what.lengths, what.seed);
        Workload::assemble(records, vec![what.class.clone()], description, what.seed)
    }

    /// Requests that arrive at a rate which changes.
    ///
    /// # Errors
    /// [`WorkloadError`], when the rates or the extent are out of range, or no request arrives.
    pub fn varying(
        intensity: Intensity,
        extent: Extent,
        lengths: &LengthPair,
        class: Class,
        seed: u64,
    ) -> Result<Workload, WorkloadError> {
        let times = varying_arrival_times(intensity, extent, seed)?;
        let description = format!("{} requests, {intensity}, {lengths}", times.len());
        Workload::assemble(made_up(&times, lengths, seed), vec![class], description, seed)
    }

    /// Requests with exponential gaps.
    ///
    /// # Errors
    /// As [`Workload::synthetic`].
    pub fn poisson(rate: f64, what: &Synthetic) -> Result<Workload, WorkloadError> {
        Workload::synthetic(Process::Poisson, rate, what)
    }

    /// Requests with gamma-distributed gaps of coefficient of variation `cv`.
    ///
    /// # Errors
    /// As [`Workload::synthetic`].
    pub fn gamma(rate: f64, cv: f64, what: &Synthetic) -> Result<Workload, WorkloadError> {
        Workload::synthetic(Process::Gamma { cv }, rate, what)
    }

    /// Requests like those of the preset called `name`, at its published rate or at `rate`.
    ///
    /// # Errors
    /// [`WorkloadError`], when there is no such preset, no rate is published and none given, or a
    /// parameter is out of range.
    pub fn preset(
        name: &str,
        rate: Option<f64>,
        num_requests: usize,
        class: Class,
        seed: u64,
    ) -> Result<Workload, WorkloadError> {
        let preset = Preset::named(name)?;
        let needed = || WorkloadError::RateNeeded { preset: preset.name.to_owned() };
        let rate = rate.or(preset.rate).ok_or_else(needed)?;
        let what = Synthetic { num_requests, lengths: preset.lengths(), class, seed };
        let workload = Workload::synthetic(preset.process(), rate, &what)?;
        let description = format!("{}: {}", preset.name, workload.description);
        Ok(Workload { description, origin: preset.name.to_owned(), ..workload })
    }

    /// The requests of the trace at `path`, all of `class`.
    ///
    /// With a `rate`, arrivals are rescaled to it; requests or sessions without times need one, and get
    /// Poisson arrivals of `seed`.
    ///
    /// # Errors
    /// [`WorkloadError`], when the trace cannot be read or the rate is out of range.
    pub fn from_trace(
        path: &Path,
        options: &TraceOptions,
        rate: Option<f64>,
        class: Class,
        seed: u64,
    ) -> Result<Workload, WorkloadError> {
        let mut trace = trace::read(path, options)?;
        if !trace.timed {
            let columns = trace.format.columns().join(", ");
            let needed = || trace::TraceError::RateNeeded { file: trace.file.clone(), columns };
            let rate = rate.ok_or_else(needed)?;
            start_at_rate(&mut trace, rate, seed)?;
        }
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let description = format!("{} requests of {name} ({})", trace.records.len(), trace.format.name());
        let mut workload = Workload::assemble(trace.records, vec![class], description, seed)?;
        workload.origin = format!("{name} ({})", trace.format.name());
        workload.warnings.splice(0..0, trace.warnings);
        if !trace.turns.is_empty() {
            workload = workload.paced(Pace::Turns(trace.turns.into()));
        }
        match rate {
            Some(rate) if trace.timed => workload.at_rate(rate),
            _ => Ok(workload),
        }
    }

    /// The requests of a list, with the classes that it names. Arrivals stay as given, so that what
    /// a run exported runs again as it was; records out of order are sorted, with a warning.
    ///
    /// # Errors
    /// [`WorkloadError`], when there is no record, or one has a length, an arrival or a class that is
    /// out of range.
    pub fn from_records(
        records: Vec<Record>,
        classes: Vec<Class>,
        seed: u64,
    ) -> Result<Workload, WorkloadError> {
        let description = format!("{} requests given", records.len());
        Workload::assemble(records, classes, description, seed)
    }

    /// All workloads at once, from one start. Classes that are alike become one (with one limit, so
    /// that it tells nothing of where a request comes from); classes that only share a name are told
    /// apart by a number.
    ///
    /// # Errors
    /// When there is nothing to merge, or one of them is a closed loop.
    pub fn merge(workloads: &[Workload]) -> Result<Workload, WorkloadError> {
        for (index, workload) in workloads.iter().enumerate() {
            workload.needs_a_clock(&format!("workloads[{index}]"), "so it cannot be merged")?;
        }
        let mut classes: Vec<Class> = Vec::new();
        let mut records = Vec::new();
        for workload in workloads {
            let ids: Vec<ClassId> =
                workload.classes.iter().map(|class| merged_class(&mut classes, class)).collect();
            let own = workload.records().into_iter();
            records.extend(own.map(|record| Record { class: ids[usize::from(record.class.0)], ..record }));
        }
        records.sort_by_key(|record| record.at);
        let parts: Vec<&str> = workloads.iter().map(|workload| workload.description.as_str()).collect();
        let seed = workloads.first().map_or(0, |workload| workload.seed);
        let mut merged = Workload::assemble(records, classes, parts.join(" + "), seed)?;
        let mut origins: Vec<&str> = workloads.iter().map(|workload| workload.origin.as_str()).collect();
        origins.retain(|origin| !origin.is_empty());
        origins.dedup();
        merged.origin = origins.join(" + ");
        merged.warnings = workloads.iter().flat_map(|workload| workload.warnings.clone()).collect();
        Ok(merged)
    }

    /// The same arrivals, stretched or squeezed about the first one so that [`Workload::rate`] is
    /// `rate`.
    ///
    /// # Errors
    /// When `rate` is out of range, all requests arrive at one instant, or it is a closed loop.
    pub fn at_rate(&self, rate: f64) -> Result<Workload, WorkloadError> {
        positive("rate", rate)?;
        let problem = format!("so they have no rate to set to {rate} req/s; change what it is made of");
        self.needs_a_clock("the workload", &problem)?;
        let seconds = self.span().as_secs_f64();
        if self.span() == Nanos::ZERO {
            return Err(WorkloadError::NoRate { num_requests: self.arrivals.len(), seconds });
        }
        let target = (self.arrivals.len() - 1) as f64 / rate;
        checked_time("the rescaled workload", target, "ask for a higher rate")?;
        let start = self.arrivals[0].at;
        let factor = target / seconds;
        let mut workload = self.clone();
        for arrival in &mut workload.arrivals {
            arrival.at = start + Nanos::from_secs_f64((arrival.at - start).as_secs_f64() * factor);
        }
        workload.description = workload.described();
        Ok(workload)
    }

    /// The same arrivals with all lengths divided by `divide`, rounded, at least 1. Prompts go on
    /// sharing what they share where the division leaves whole blocks.
    ///
    /// # Errors
    /// When `divide` is 0.
    pub fn scaled_lengths(&self, divide: u32) -> Result<Workload, WorkloadError> {
        if divide == 0 {
            return Err(WorkloadError::parameter("divide", divide, "at least 1"));
        }
        let scaled = |tokens: u32| ((tokens + divide / 2) / divide).max(1);
        let mut workload = self.clone();
        let mut unshared = 0;
        for arrival in &mut workload.arrivals {
            arrival.prompt_tokens = scaled(arrival.prompt_tokens);
            arrival.output_tokens = scaled(arrival.output_tokens);
            arrival.max_tokens = scaled(arrival.max_tokens);
            if let PromptContent::HashIds { tokens_per_id, .. } = &mut arrival.content {
                if tokens_per_id.is_multiple_of(divide) {
                    *tokens_per_id /= divide;
                } else {
                    arrival.content = PromptContent::Unique;
                    unshared += 1;
                }
            }
        }
        for class in &mut workload.classes {
            class.max_tokens = class.max_tokens.map(scaled);
        }
        if unshared > 0 {
            let warning = format!(
                "{unshared} prompts no longer share prefixes: {divide} does not divide a trace block"
            );
            workload.warnings.push(warning);
        }
        workload.description = if workload.is_closed_loop() {
            format!("{}, lengths / {divide}", self.description)
        } else {
            workload.described()
        };
        Ok(workload)
    }

    /// What it has become, in a line: the numbers that it was made with hold no longer.
    fn described(&self) -> String {
        let count = self.arrivals.len();
        let mean = |tokens: fn(&Arrival) -> u32| {
            self.arrivals.iter().map(|arrival| f64::from(tokens(arrival))).sum::<f64>() / count as f64
        };
        let origin = if self.origin.is_empty() { String::new() } else { format!("{}: ", self.origin) };
        let rate =
            self.rate().map_or(String::new(), |rate| format!(" at {} req/s", (rate * 1e3).round() / 1e3));
        let (prompts, outputs) =
            (mean(|arrival| arrival.prompt_tokens), mean(|arrival| arrival.output_tokens));
        format!(
            "{origin}{count} requests{rate}, prompts of {prompts:.0} and outputs of {outputs:.0} tokens on average"
        )
    }

    /// Requests per second: the number of gaps over the time from first to last arrival. `None` when
    /// that time is zero, and for a closed loop.
    pub fn rate(&self) -> Option<f64> {
        let seconds = self.span().as_secs_f64();
        (seconds > 0.0 && !self.is_closed_loop()).then(|| (self.arrivals.len() - 1) as f64 / seconds)
    }

    /// From first to last arrival.
    pub fn span(&self) -> Nanos {
        match (self.arrivals.first(), self.arrivals.last()) {
            (Some(first), Some(last)) => last.at - first.at,
            _ => Nanos::ZERO,
        }
    }

    /// The classes, by [`ClassId`].
    pub fn classes(&self) -> &[Class] {
        &self.classes
    }

    /// Whether arrivals wait for completions.
    pub fn is_closed_loop(&self) -> bool {
        !matches!(self.pace, Pace::Clock)
    }

    /// Whether the `index`-th arrival waits for a completion, so that when it comes is not known.
    pub fn waits(&self, index: usize) -> bool {
        match &self.pace {
            Pace::Clock => false,
            Pace::Users { concurrency, .. } => index >= *concurrency,
            Pace::Turns(turns) => turns[index].number > 0,
        }
    }

    /// Where arrivals are the turns of sessions: which.
    pub fn turns(&self) -> Option<&[Turn]> {
        match &self.pace {
            Pace::Turns(turns) => Some(turns),
            _ => None,
        }
    }

    /// Its arrivals as a source for a driver.
    pub fn source(&self) -> Box<dyn Source + Send> {
        let arrivals = self.arrivals.clone();
        match &self.pace {
            Pace::Clock => Box::new(Scheduled::new(arrivals)),
            Pace::Users { concurrency, think } => {
                Box::new(UserSource::new(arrivals, *concurrency, *think, self.seed))
            }
            Pace::Turns(turns) => Box::new(TurnSource::new(arrivals, Arc::clone(turns))),
        }
    }

    /// Its arrivals as records: [`Workload::from_records`] with [`Workload::classes`] makes the same
    /// workload of them, unless it is a closed loop.
    pub fn records(&self) -> Vec<Record> {
        let lengths = self.arrivals.iter().map(|arrival| (arrival.class, arrival.output_tokens));
        let limits = class_limits(lengths, &self.classes);
        let record = |arrival: &Arrival| {
            let class_index = usize::from(arrival.class.0);
            let class = &self.classes[class_index];
            let own_limit = arrival.max_tokens != limits[class_index];
            Record {
                at: arrival.at,
                prompt_tokens: arrival.prompt_tokens,
                output_tokens: arrival.output_tokens,
                max_tokens: own_limit.then_some(arrival.max_tokens),
                priority: (class.priority != arrival.priority).then_some(arrival.priority),
                class: arrival.class,
                content: arrival.content.clone(),
            }
        };
        self.arrivals.iter().map(record).collect()
    }
}

/// Records with drawn lengths at `times`.
pub(crate) fn made_up(times: &[Time], lengths: &LengthPair, seed: u64) -> Vec<Record> {
    let record = |(index, at): (usize, &Time)| {
        let (prompt_tokens, output_tokens) = lengths.draw(seed, index as u64);
        Record { at: *at, prompt_tokens, output_tokens, ..Record::default() }
    };
    times.iter().enumerate().map(record).collect()
}

/// Gives the requests of a trace without times, or the sessions, Poisson arrivals.
fn start_at_rate(trace: &mut trace::Trace, rate: f64, seed: u64) -> Result<(), WorkloadError> {
    let begins = |turns: &[Turn], index: usize| turns.get(index).is_none_or(|turn| turn.number == 0);
    let num_starts = (0..trace.records.len()).filter(|index| begins(&trace.turns, *index)).count();
    let mut starts = arrival_times(Process::Poisson, rate, num_starts, seed)?.into_iter();
    let mut at = Time::ZERO;
    for index in 0..trace.records.len() {
        if begins(&trace.turns, index) {
            at = starts.next().expect("as many starts as were counted");
        }
        trace.records[index].at = at;
        if let Some(turn) = trace.turns.get_mut(index) {
            turn.earliest = at;
        }
    }
    Ok(())
}

/// The id of `class` among the merged `classes`, which it joins unless one just like it is there.
fn merged_class(classes: &mut Vec<Class>, class: &Class) -> ClassId {
    let mut name = class.name.clone();
    for number in 2.. {
        match classes.iter().position(|known| known.name == name) {
            Some(index) if Class { name: class.name.clone(), ..classes[index].clone() } == *class => {
                return ClassId(index as u16);
            }
            Some(_) => name = format!("{}-{number}", class.name),
            None => break,
        }
    }
    classes.push(Class { name, ..class.clone() });
    ClassId((classes.len() - 1) as u16)
}

impl Workload {
    /// The same arrivals, come as `pace` has it.
    pub(crate) fn paced(self, pace: Pace) -> Workload {
        Workload { pace, ..self }
    }

    fn needs_a_clock(&self, what: &str, problem: &str) -> Result<(), WorkloadError> {
        if !self.is_closed_loop() {
            return Ok(());
        }
        let description = self.description.clone();
        Err(WorkloadError::ClosedLoop { what: what.to_owned(), description, problem: problem.to_owned() })
    }

    /// Checks everything, sorts, and settles what classes leave open.
    pub(crate) fn assemble(
        mut records: Vec<Record>,
        classes: Vec<Class>,
        description: String,
        seed: u64,
    ) -> Result<Workload, WorkloadError> {
        check(&records, &classes)?;
        let mut warnings = Vec::new();
        let late = records.windows(2).filter(|pair| pair[1].at < pair[0].at).count();
        if late > 0 {
            records.sort_by_key(|record| record.at);
            warnings.push(format!("{late} records came before the one preceding them: sorted by time"));
        }
        let lengths = records
            .iter()
            .map(|record| (record.class, record.output_tokens.min(record.max_tokens.unwrap_or(u32::MAX))));
        let limits = class_limits(lengths, &classes);
        let mut cut = 0;
        let arrival = |record: Record| {
            let class_index = usize::from(record.class.0);
            let class = &classes[class_index];
            let max_tokens = record.max_tokens.unwrap_or(limits[class_index]);
            cut += usize::from(record.output_tokens > max_tokens);
            Arrival {
                at: record.at,
                prompt_tokens: record.prompt_tokens,
                output_tokens: record.output_tokens.min(max_tokens),
                max_tokens,
                priority: record.priority.unwrap_or(class.priority),
                slo: class.slo,
                class: record.class,
                content: record.content,
            }
        };
        let arrivals = records.into_iter().map(arrival).collect();
        if cut > 0 {
            warnings.push(format!("{cut} outputs are longer than max_tokens: cut there"));
        }
        let class_names = classes.iter().map(|class| class.name.clone()).collect();
        let origin = String::new();
        Ok(Workload {
            arrivals,
            class_names,
            description,
            origin,
            seed,
            warnings,
            classes,
            pace: Pace::Clock,
        })
    }
}

/// The limit on output tokens of each class: the one given, or its largest output.
fn class_limits(outputs: impl Iterator<Item = (ClassId, u32)>, classes: &[Class]) -> Vec<u32> {
    let mut longest = vec![1; classes.len()];
    for (class, output_tokens) in outputs {
        let of_class = &mut longest[usize::from(class.0)];
        *of_class = output_tokens.max(*of_class);
    }
    classes.iter().zip(longest).map(|(class, longest)| class.max_tokens.unwrap_or(longest)).collect()
}

fn check(records: &[Record], classes: &[Class]) -> Result<(), WorkloadError> {
    if records.is_empty() {
        return Err(WorkloadError::parameter("the number of requests", 0, "at least 1"));
    }
    if classes.len() > usize::from(u16::MAX) {
        return Err(WorkloadError::parameter("the number of classes", classes.len(), "at most 65535"));
    }
    let in_range = |tokens: u32| (1..=MAX_TOKENS).contains(&tokens);
    let range = || format!("between 1 and {MAX_TOKENS} tokens");
    for (index, class) in classes.iter().enumerate() {
        if classes[..index].iter().any(|other| other.name == class.name) {
            let parameter = format!("classes[{index}].name");
            return Err(WorkloadError::parameter(
                parameter,
                format!("{:?}", class.name),
                "unlike the others",
            ));
        }
        if let Some(max_tokens) = class.max_tokens.filter(|tokens| !in_range(*tokens)) {
            let parameter = format!("max_tokens of class {:?}", class.name);
            return Err(WorkloadError::parameter(parameter, max_tokens, range()));
        }
    }
    for (index, record) in records.iter().enumerate() {
        let wrong = |field: &str, value: u32, range: String| {
            Err(WorkloadError::parameter(format!("records[{index}].{field}"), value, range))
        };
        if usize::from(record.class.0) >= classes.len() {
            let range = format!("one of the {} classes given (from 0)", classes.len());
            return wrong("class", u32::from(record.class.0), range);
        }
        let max_tokens = record.max_tokens.unwrap_or(1);
        let lengths = [
            ("prompt_tokens", record.prompt_tokens),
            ("output_tokens", record.output_tokens),
            ("max_tokens", max_tokens),
        ];
        for (field, tokens) in lengths {
            if !in_range(tokens) {
                return wrong(field, tokens, range());
            }
        }
        let what = format!("records[{index}].at");
        checked_time(&what, record.at.as_secs_f64(), "subtract the first arrival, and give seconds")?;
    }
    Ok(())
}
