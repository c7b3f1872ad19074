//! What a run left behind, as `kvrelay.Result` wraps it: columns and counted numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use kvrelay_core::metrics::{self, Attainment, Distribution, PooledGaps, Rates, Window};
use kvrelay_core::record::{Log, RequestRecord, StepRecord, Verdict};
use kvrelay_core::request::ClassId;
use kvrelay_core::slo::Slo;
use kvrelay_core::stats::{self, Found, Growth, Trend};
use kvrelay_core::time::{Nanos, Time};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::objectives::slo_to;

/// How many values are defined, their mean, and the asked percentiles.
type Summary = (u64, Option<f64>, Vec<Option<f64>>);

/// Value, lower and upper limit, batches, observations, correlation of neighbouring batches.
type Limits = (f64, f64, f64, usize, usize, f64);

/// A latency of a request, in seconds.
type Latency = fn(&RequestRecord) -> Option<f64>;

/// Latencies by name, those that requests have on their own.
const LATENCIES: [(&str, Latency); 10] = [
    ("ttft", |r| r.ttft().map(Nanos::as_secs_f64)),
    ("held", |r| r.held().map(Nanos::as_secs_f64)),
    ("queue", |r| r.queue().map(Nanos::as_secs_f64)),
    ("prefill", |r| r.prefill().map(Nanos::as_secs_f64)),
    ("tpot", RequestRecord::tpot),
    ("e2e", |r| r.e2e().map(Nanos::as_secs_f64)),
    ("max_gap", |r| r.max_gap.map(|value| value.as_secs_f64())),
    ("waiting_for_room", |r| r.awaiting_room().map(Nanos::as_secs_f64)),
    ("transfer", |r| r.transfer().map(Nanos::as_secs_f64)),
    ("decode_queue", |r| r.decode_queue().map(Nanos::as_secs_f64)),
];

/// Records of one run, simulated or measured, or of a window of it.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct Result {
    /// What counts; in a window, its part of the run.
    log: Log,
    window: Option<Window>,
    class_names: Vec<String>,
    gaps: OnceLock<PooledGaps>,
    /// How many others each request found when it arrived, those outside the window too.
    found: OnceLock<Vec<Found>>,
    /// Where in its workload's list the request of each id stands, where that is known.
    places: Option<Arc<[u64]>>,
}

/// Whether a record is good; `None` when it is on neither side.
pub(crate) fn good(record: &RequestRecord) -> Option<bool> {
    match record.verdict() {
        Verdict::Good => Some(true),
        Verdict::Miss => Some(false),
        Verdict::Out => None,
    }
}

impl Result {
    /// Requests are listed by id.
    pub(crate) fn new(mut log: Log, class_names: Vec<String>) -> Result {
        log.requests.sort_by_key(|record| record.id);
        Result { log, window: None, class_names, gaps: OnceLock::new(), found: OnceLock::new(), places: None }
    }

    /// With what its source says of where requests stand in their workload's list.
    pub(crate) fn placed(self, places: Arc<[u64]>) -> Result {
        Result { places: Some(places), ..self }
    }

    fn found(&self) -> &[Found] {
        self.found.get_or_init(|| stats::found_on_arrival(&self.log.requests))
    }

    /// What rates are divided by: the makespan, or the length of the window.
    fn seconds(&self) -> Option<f64> {
        match self.window {
            Some(window) => Some(window.seconds()),
            None => metrics::makespan(&self.log.requests),
        }
    }

    /// First and last arrival.
    fn span(&self) -> Option<(Time, Time)> {
        let arrivals = || self.log.requests.iter().map(|record| record.arrival);
        Some((arrivals().min()?, arrivals().max()?))
    }

    /// The interval of good requests per second: they count by their arrivals, in slices of the window
    /// or of the time from first to last arrival, and are scaled to what the rate is divided by.
    fn goodput_interval(&self, confidence: f64) -> std::result::Result<stats::Interval, stats::NoInterval> {
        let requests = &self.log.requests;
        let good: Vec<f64> = requests
            .iter()
            .filter(|record| record.verdict() == Verdict::Good)
            .map(|record| record.arrival.as_secs_f64())
            .collect();
        let (start, end) = match self.window {
            Some(window) => (window.start, window.end),
            None => self.span().unwrap_or_default(),
        };
        let (start, end) = (start.as_secs_f64(), end.as_secs_f64());
        let count = requests.iter().filter(|record| record.verdict() != Verdict::Out).count();
        let seconds = self.seconds().unwrap_or(0.0);
        if !(seconds > 0.0 && end > start) {
            return Err(stats::NoInterval::TooFew { count: 0, needed: stats::MIN_BATCHES });
        }
        stats::rate(&good, count, start, end, (end - start) / seconds, confidence)
    }

    /// The record of one request that was not part of a run.
    pub(crate) fn of_one(record: RequestRecord) -> Result {
        let class_names = vec!["default".to_owned(); usize::from(record.class.0) + 1];
        Result::new(Log { requests: vec![record], ..Log::default() }, class_names)
    }

    fn class(&self, name: Option<&str>) -> Option<ClassId> {
        let index = self.class_names.iter().position(|known| Some(known.as_str()) == name)?;
        Some(ClassId(index as u16))
    }

    fn floats<'py>(
        &self,
        py: Python<'py>,
        value: impl Fn(&RequestRecord) -> Option<f64>,
    ) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_iter(py, self.log.requests.iter().map(|record| value(record).unwrap_or(f64::NAN)))
    }

    fn ints<'py>(&self, py: Python<'py>, value: impl Fn(&RequestRecord) -> i64) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_iter(py, self.log.requests.iter().map(value))
    }

    fn strings(&self, value: impl Fn(&RequestRecord) -> Option<String>) -> Vec<Option<String>> {
        self.log.requests.iter().map(value).collect()
    }
}

/// First third, last third, slope, ratio.
type TrendTold = (f64, f64, f64, f64);

/// Arrivals that looked, all requests, waiting ones; long, grew, surely grows, may have grown.
type Grown = (usize, TrendTold, TrendTold, (bool, bool, bool, bool));

fn told(found: std::result::Result<stats::Interval, stats::NoInterval>) -> (Option<Limits>, Option<String>) {
    match found {
        Ok(found) => {
            let stats::Interval { value, low, high, num_batches, count, correlation } = found;
            (Some((value, low, high, num_batches, count, correlation)), None)
        }
        Err(why) => (None, Some(why.to_string())),
    }
}

/// The interval of the mean of independent replications' values, or why there is none.
#[pyfunction]
pub(crate) fn replication_interval(values: Vec<f64>, confidence: f64) -> (Option<Limits>, Option<String>) {
    told(stats::of_replications(&values, confidence))
}

/// How many requests, all of them good, the lower confidence limit of attainment needs to reach
/// `target`; `None` when no number is enough.
#[pyfunction]
pub(crate) fn requests_for_attainment(target: f64, confidence: f64) -> Option<u64> {
    stats::smallest_for_share(target, confidence)
}

fn seconds(time: Option<Time>) -> Option<f64> {
    time.map(Time::as_secs_f64)
}

#[pymethods]
impl Result {
    fn __len__(&self) -> usize {
        self.log.requests.len()
    }

    /// Names of the SLO classes.
    #[getter]
    fn class_names(&self) -> Vec<String> {
        self.class_names.clone()
    }

    /// One column a field of the requests' records, in the order of their ids. Seconds; missing
    /// floats are NaN, missing workers −1, a verdict on neither side −1.
    fn requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = PyDict::new(py);
        let worker =
            |worker: Option<kvrelay_core::cluster::WorkerId>| worker.map_or(-1, |worker| i64::from(worker.0));
        columns.set_item("id", self.ints(py, |r| r.id.0 as i64))?;
        columns
            .set_item("slo_class", self.strings(|r| self.class_names.get(usize::from(r.class.0)).cloned()))?;
        columns.set_item("status", self.strings(|r| Some(r.status.name().to_owned())))?;
        columns.set_item("reason", self.strings(|r| r.reason.as_deref().map(str::to_owned)))?;
        columns.set_item("arrival", self.floats(py, |r| Some(r.arrival.as_secs_f64())))?;
        columns.set_item("prompt_tokens", self.ints(py, |r| i64::from(r.prompt_tokens)))?;
        columns.set_item("output_tokens", self.ints(py, |r| i64::from(r.output_tokens)))?;
        columns.set_item("cached_tokens", self.ints(py, |r| i64::from(r.cached_tokens)))?;
        columns.set_item("prefill_worker", self.ints(py, |r| worker(r.prefill_worker)))?;
        columns.set_item("decode_worker", self.ints(py, |r| worker(r.decode_worker)))?;
        columns.set_item("admitted", self.floats(py, |r| seconds(r.admitted)))?;
        columns.set_item("prefill_start", self.floats(py, |r| seconds(r.prefill_start)))?;
        columns.set_item("first_token", self.floats(py, |r| seconds(r.first_token)))?;
        columns.set_item("transfer_start", self.floats(py, |r| seconds(r.transfer_start)))?;
        columns.set_item("transfer_end", self.floats(py, |r| seconds(r.transfer_end)))?;
        columns.set_item("decode_start", self.floats(py, |r| seconds(r.decode_start)))?;
        columns.set_item("last_token", self.floats(py, |r| seconds(r.last_token)))?;
        columns.set_item("end", self.floats(py, |r| seconds(r.end)))?;
        columns.set_item("ttft", self.floats(py, |r| r.ttft().map(|ttft| ttft.as_secs_f64())))?;
        columns.set_item("tpot", self.floats(py, RequestRecord::tpot))?;
        columns.set_item("e2e", self.floats(py, |r| r.e2e().map(|e2e| e2e.as_secs_f64())))?;
        columns.set_item("max_gap", self.floats(py, |r| r.max_gap.map(|gap| gap.as_secs_f64())))?;
        columns.set_item("preemptions", self.ints(py, |r| i64::from(r.preemptions)))?;
        columns.set_item("good", self.ints(py, |r| good(r).map_or(-1, i64::from)))?;
        Ok(columns)
    }

    /// One column a field of the runs' records, in the order of their ends. Seconds.
    fn steps<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = PyDict::new(py);
        let ints = |value: fn(&StepRecord) -> i64| PyArray1::from_iter(py, self.log.steps.iter().map(value));
        let floats =
            |value: fn(&StepRecord) -> f64| PyArray1::from_iter(py, self.log.steps.iter().map(value));
        columns.set_item("worker", ints(|s| i64::from(s.worker.0)))?;
        columns.set_item("start", floats(|s| s.start.as_secs_f64()))?;
        columns.set_item("end", floats(|s| s.end.as_secs_f64()))?;
        columns.set_item("steps", ints(|s| i64::from(s.steps)))?;
        columns.set_item("num_prefill", ints(|s| i64::from(s.shape.num_prefill)))?;
        columns.set_item("prefill_tokens", ints(|s| s.shape.prefill_tokens as i64))?;
        columns.set_item("prefill_context", ints(|s| s.shape.prefill_context as i64))?;
        columns.set_item("prefill_square", ints(|s| s.shape.prefill_square as i64))?;
        columns.set_item("num_decode", ints(|s| i64::from(s.shape.num_decode)))?;
        columns.set_item("decode_context", ints(|s| s.shape.decode_context as i64))?;
        columns.set_item("emitted", ints(|s| s.emitted as i64))?;
        columns.set_item("held_blocks", ints(|s| i64::from(s.held_blocks)))?;
        Ok(columns)
    }

    /// Good, offered, out, and out for want of an SLO; of one class or of all.
    #[pyo3(signature = (class_name=None))]
    fn counts(&self, class_name: Option<&str>) -> (u64, u64, u64, u64) {
        let counts = Attainment::of(&self.log.requests, self.class(class_name));
        (counts.good, counts.offered, counts.out, counts.without_slo)
    }

    /// Seconds from the first arrival to the last counted event; of a window, its length.
    #[getter]
    fn makespan(&self) -> Option<f64> {
        self.seconds()
    }

    /// Good requests per second of makespan.
    #[getter]
    fn goodput(&self) -> Option<f64> {
        Rates::of(&self.log.requests, self.seconds()).map(|rates| rates.good)
    }

    /// Finished requests and their output tokens per second of makespan.
    #[getter]
    fn throughput(&self) -> Option<(f64, f64)> {
        let rates = Rates::of(&self.log.requests, self.seconds())?;
        Some((rates.finished, rates.output_tokens))
    }

    /// The requests that arrived in [start, end) seconds, with the worker runs that overlap it. An open
    /// start is the first arrival, an open end lies right after the last one. Gaps are pooled over the
    /// whole run, so a window has none.
    #[pyo3(signature = (start=None, end=None))]
    fn window(&self, start: Option<f64>, end: Option<f64>) -> Result {
        let (first, last) = self.span().unwrap_or_default();
        let (first, after) = match self.window {
            Some(window) => (window.start, window.end),
            None => (first, last + Nanos(1)),
        };
        let window = Window {
            start: start.map_or(first, Time::from_secs_f64),
            end: end.map_or(after, Time::from_secs_f64),
        };
        let (requests, found): (Vec<_>, Vec<_>) = self
            .log
            .requests
            .iter()
            .zip(self.found())
            .filter(|(record, _)| window.holds(record))
            .map(|(record, found)| (record.clone(), *found))
            .unzip();
        let overlaps = |step: &&StepRecord| step.start < window.end && step.end > window.start;
        let steps = self.log.steps.iter().filter(overlaps).copied().collect();
        Result {
            log: Log { requests, steps, gaps: Vec::new() },
            window: Some(window),
            class_names: self.class_names.clone(),
            gaps: OnceLock::new(),
            found: OnceLock::from(found),
            places: self.places.clone(),
        }
    }

    /// Where in its workload's list each request stands, in the order of ids; `None` where that is not
    /// known.
    fn places<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<i64>>> {
        let places = self.places.as_ref()?;
        Some(self.ints(py, |record| places[record.id.0 as usize] as i64))
    }

    /// Start and end of the window in seconds; `None` of a whole run.
    #[getter]
    fn bounds(&self) -> Option<(f64, f64)> {
        self.window.map(|window| (window.start.as_secs_f64(), window.end.as_secs_f64()))
    }

    /// First and last arrival in seconds.
    #[getter]
    fn arrivals(&self) -> Option<(f64, f64)> {
        self.span().map(|(first, last)| (first.as_secs_f64(), last.as_secs_f64()))
    }

    /// MSER-5 over TTFT in the order of arrival: when the first request that stays arrived, how many
    /// with a TTFT came before it, and whether the first half of the run had an end of the warm-up.
    fn warmup(&self) -> Option<(f64, usize, bool)> {
        let started = || self.log.requests.iter().filter(|record| record.first_token.is_some());
        let ttfts: Vec<f64> = started().filter_map(LATENCIES[0].1).collect();
        let warmup = stats::mser5(&ttfts);
        let arrival = started().nth(warmup.skipped)?.arrival.as_secs_f64();
        Some((arrival, warmup.skipped, warmup.settled))
    }

    /// The confidence interval of `attainment`, `goodput`, or of a latency's mean or percentile; or why
    /// there is none. `None` when there is no such metric.
    #[pyo3(signature = (metric, percent, confidence, class_name=None))]
    fn interval(
        &self,
        metric: &str,
        percent: Option<f64>,
        confidence: f64,
        class_name: Option<&str>,
    ) -> Option<(Option<Limits>, Option<String>)> {
        let class = self.class(class_name);
        let records =
            || self.log.requests.iter().filter(|record| class.is_none_or(|class| record.class == class));
        let found = match metric {
            "attainment" => stats::share(&records().filter_map(good).collect::<Vec<_>>(), confidence),
            "goodput" => self.goodput_interval(confidence),
            latency => {
                let (_, value) = LATENCIES.iter().find(|(name, _)| *name == latency)?;
                let values: Vec<f64> = records().filter_map(value).collect();
                match percent {
                    Some(percent) => stats::percentile(&values, percent, confidence),
                    None => stats::mean(&values, confidence),
                }
            }
        };
        Some(told(found))
    }

    /// What arrivals found in the system: how many looked; of all requests, mean of the first and of
    /// the last third, growth per arrival, its ratio to its standard error; the same of the waiting ones;
    /// whether the run is long enough, the queue grew, would grow again, may have grown; or why that cannot be told.
    fn growth(&self) -> (Option<Grown>, Option<String>) {
        let trend = |t: Trend| (t.first_third, t.last_third, t.slope, t.ratio);
        match Growth::of(&self.log.requests, self.found()) {
            Ok(growth) => {
                let verdicts =
                    (growth.is_long(), growth.grew(), growth.surely_grows(), growth.may_have_grown());
                (Some((growth.count, trend(growth.present), trend(growth.waiting), verdicts)), None)
            }
            Err(short) => (None, Some(short.to_string())),
        }
    }

    /// The distinct pairs of class name and objectives, in order of arrival.
    fn objectives(&self, py: Python<'_>) -> PyResult<Vec<(String, Py<PyAny>)>> {
        let mut seen: Vec<(ClassId, Slo)> = Vec::new();
        for record in self.log.requests.iter().filter(|record| record.slo.is_some()) {
            let pair = (record.class, record.slo);
            // Mostly it is one of the latest.
            if !seen.iter().rev().any(|known| *known == pair) {
                seen.push(pair);
            }
        }
        let named = |(class, slo): &(ClassId, Slo)| {
            Ok((self.class_names[usize::from(class.0)].clone(), slo_to(py, slo)?))
        };
        seen.iter().map(named).collect()
    }

    /// Per metric (ttft, held, queue, prefill, tpot, e2e, max_gap, itl): count, mean and the asked
    /// percentiles of the values that are defined, in seconds.
    #[pyo3(signature = (percents, class_name=None))]
    fn distributions(&self, percents: Vec<f64>, class_name: Option<&str>) -> BTreeMap<&'static str, Summary> {
        let class = self.class(class_name);
        let records =
            || self.log.requests.iter().filter(|record| class.is_none_or(|class| record.class == class));
        let mut all: BTreeMap<_, _> = LATENCIES
            .into_iter()
            .map(|(name, value)| {
                let values = Distribution::new(records().filter_map(value));
                let percentiles = percents.iter().map(|percent| values.percentile(*percent)).collect();
                (name, (values.count() as u64, values.mean(), percentiles))
            })
            .collect();
        if class.is_none() && self.window.is_none() {
            let gaps = self.gaps.get_or_init(|| PooledGaps::new(&self.log.gaps));
            let percentiles = match gaps.percentiles(&percents) {
                Some(values) => values.into_iter().map(Some).collect(),
                None => vec![None; percents.len()],
            };
            all.insert("itl", (gaps.count(), gaps.mean(), percentiles));
        }
        all
    }

    /// The objectives of request `id`; `None` if there is no such request.
    fn slo(&self, py: Python<'_>, id: u64) -> PyResult<Option<Py<PyAny>>> {
        let found = self.log.requests.binary_search_by_key(&id, |record| record.id.0).ok();
        found.map(|index| slo_to(py, &self.log.requests[index].slo)).transpose()
    }
}
