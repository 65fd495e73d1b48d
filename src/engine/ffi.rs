//! The C API: `include/cactus.h` declares it, `docs/c-api.md` explains it.
//!
//! Nothing here panics across the border: a panic becomes an error of the call. Strings that come in are UTF-8 and end with
//! a zero byte; what goes out is written into buffers of the caller, with a zero byte at the end.
#![allow(unsafe_code)]

pub mod index;

use super::handle::{Asked, Handle};
use super::response::{self, THRESHOLD};
use crate::error::{Error, Kind, Result};
use serde_json::Value;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

/// A piece of an answer, the id of the token that completed it, and what the caller gave along.
pub type TokenCallback = Option<unsafe extern "C" fn(text: *const c_char, token_id: u32, user: *mut c_void)>;
/// Level (0 debug, 1 info, 2 warning, 3 error), part of the program, message, and what the caller gave along.
pub type LogCallback =
    Option<unsafe extern "C" fn(level: c_int, component: *const c_char, message: *const c_char, user: *mut c_void)>;

/// The buffer is too small.
const TOO_SMALL: c_int = -2;
const FAILED: c_int = -1;
/// Log level of errors.
const ERROR_LEVEL: c_int = 3;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Messages below this level are not handed on.
static LEVEL: AtomicI32 = AtomicI32::new(2);
static LOG: Mutex<Log> = Mutex::new(Log { callback: None, user: std::ptr::null_mut() });

struct Log {
    callback: LogCallback,
    user: *mut c_void,
}

// SAFETY: the pointer is only handed back to the callback, which may be called from any thread, as the header says.
unsafe impl Send for Log {}

fn fail(error: &Error) {
    let text = CString::new(error.in_one_line().replace('\0', "?")).unwrap_or_default();
    if LEVEL.load(Ordering::Relaxed) <= ERROR_LEVEL {
        let log = LOG.lock().unwrap_or_else(|e| e.into_inner());
        let (callback, user) = (log.callback, log.user);
        drop(log);
        if let Some(callback) = callback {
            // SAFETY: the texts live until after the call.
            unsafe { callback(ERROR_LEVEL, c"cactus".as_ptr(), text.as_ptr(), user) };
        }
    }
    LAST_ERROR.with_borrow_mut(|last| *last = text);
}

/// Runs `work`; errors and panics become the last error of this thread and `failed`.
fn guarded<T>(failed: impl FnOnce(&Error) -> T, work: impl FnOnce() -> Result<T>) -> T {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let error = match outcome {
        Ok(Ok(value)) => return value,
        Ok(Err(error)) => error,
        Err(_) => Error::new(Kind::Io, "internal error"),
    };
    fail(&error);
    failed(&error)
}

/// # Safety
/// `text` is null or a C string that lives as long as the result.
unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::usage(format!("{name} is not UTF-8 text")))
}

/// # Safety
/// As [`text`].
unsafe fn needed<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { text(pointer, name) }?.ok_or_else(|| Error::usage(format!("{name} is null")))
}

/// # Safety
/// `handle` is null or comes from [`cactus_init`] and was not destroyed.
unsafe fn handle<'a>(handle: *mut c_void) -> Result<&'a Handle> {
    // SAFETY: the caller's promise.
    unsafe { handle.cast::<Handle>().as_ref() }.ok_or_else(|| Error::usage("the model is null"))
}

/// Where text goes out.
#[derive(Clone, Copy)]
struct Buffer {
    start: *mut c_char,
    size: usize,
}

impl Buffer {
    /// Writes all of `text` and a zero byte, or nothing; the number of bytes without the zero.
    ///
    /// # Safety
    /// `start` is null or valid for `size` bytes.
    unsafe fn write(self, text: &str) -> Option<c_int> {
        let length = c_int::try_from(text.len()).ok()?;
        if self.start.is_null() || self.size <= text.len() {
            return None;
        }
        // SAFETY: there is room for the text and the zero.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.start.cast(), text.len());
            *self.start.add(text.len()) = 0;
        }
        Some(length)
    }

    /// Writes what `work` returns; after an error, an error object as far as there is room for it.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    unsafe fn respond(self, work: impl FnOnce() -> Result<Value>) -> c_int {
        let failed = |error: &Error| {
            // SAFETY: the caller's promise.
            let _ = unsafe { self.write(&response::failure(error, THRESHOLD).to_string()) };
            FAILED
        };
        guarded(failed, || {
            let text = work()?.to_string();
            let too_small = || Error::usage(format!("the buffer of {} bytes is too small for {}", self.size, text.len() + 1));
            // SAFETY: the caller's promise.
            unsafe { self.write(&text) }.ok_or_else(too_small)
        })
    }
}

/// Opens the bundle in the folder `model_path`, a chat model or an embedding model. Answers come from the files in
/// `corpus_dir`, if that is not null; what was read of them is kept in its folder `.cactus` with `cache_index`. Null after an
/// error.
///
/// # Safety
/// Strings are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_init(model_path: *const c_char, corpus_dir: *const c_char, cache_index: bool) -> *mut c_void {
    guarded(
        |_| std::ptr::null_mut(),
        || {
            // SAFETY: the caller's promise.
            let (path, corpus) = unsafe { (needed(model_path, "model_path")?, text(corpus_dir, "corpus_dir")?) };
            let corpus = corpus.filter(|dir| !dir.is_empty()).map(Path::new);
            Ok(Box::into_raw(Box::new(Handle::open(Path::new(path), corpus, cache_index)?)).cast())
        },
    )
}

/// Closes a model; null is allowed. Nothing else may be running with it.
///
/// # Safety
/// `model` is null or comes from [`cactus_init`], and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_destroy(model: *mut c_void) {
    if model.is_null() {
        return;
    }
    guarded(
        |_| (),
        || {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(model.cast::<Handle>()) });
            Ok(())
        },
    );
}

/// Forgets what was read.
///
/// # Safety
/// `model` is null or comes from [`cactus_init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_reset(model: *mut c_void) {
    // SAFETY: the caller's promise.
    guarded(|_| (), || unsafe { handle(model) }?.reset());
}

/// Ends the answer that is being written; from any thread, also from the callback.
///
/// # Safety
/// `model` is null or comes from [`cactus_init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_stop(model: *mut c_void) {
    guarded(
        |_| (),
        || {
            // SAFETY: the caller's promise.
            unsafe { handle(model) }?.stop();
            Ok(())
        },
    );
}

/// Answers a conversation. Bytes written, or -1.
///
/// # Safety
/// `model` comes from [`cactus_init`], strings are null or C strings, `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_complete(
    model: *mut c_void,
    messages_json: *const c_char,
    buffer: *mut c_char,
    size: usize,
    options_json: *const c_char,
    tools_json: *const c_char,
    callback: TokenCallback,
    user: *mut c_void,
    pcm: *const u8,
    pcm_bytes: usize,
) -> c_int {
    let out = Buffer { start: buffer, size };
    // SAFETY: the caller's promises.
    unsafe {
        out.respond(|| {
            refuse_sound(pcm, pcm_bytes)?;
            let asked = asked(messages_json, options_json, tools_json)?;
            handle(model)?.complete(&asked, &mut |piece, id| {
                if let (Some(callback), Ok(piece)) = (callback, CString::new(piece.replace('\0', ""))) {
                    callback(piece.as_ptr(), id, user);
                }
            })
        })
    }
}

/// Reads a conversation, so that an answer to it begins sooner. Bytes written, or -1.
///
/// # Safety
/// As [`cactus_complete`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_prefill(
    model: *mut c_void,
    messages_json: *const c_char,
    buffer: *mut c_char,
    size: usize,
    options_json: *const c_char,
    tools_json: *const c_char,
    pcm: *const u8,
    pcm_bytes: usize,
) -> c_int {
    let out = Buffer { start: buffer, size };
    // SAFETY: the caller's promises.
    unsafe {
        out.respond(|| {
            refuse_sound(pcm, pcm_bytes)?;
            handle(model)?.prefill(&asked(messages_json, options_json, tools_json)?)
        })
    }
}

fn refuse_sound(pcm: *const u8, bytes: usize) -> Result<()> {
    if pcm.is_null() || bytes == 0 { Ok(()) } else { Err(Error::unsupported("this model does not listen")) }
}

/// # Safety
/// All three are null or C strings.
unsafe fn asked<'a>(messages: *const c_char, options: *const c_char, tools: *const c_char) -> Result<Asked<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(Asked {
            messages: needed(messages, "messages_json")?,
            options: text(options, "options_json")?,
            tools: text(tools, "tools_json")?,
        })
    }
}

/// The prompt that a conversation becomes. Its length, -1, or -2 when the buffer is too small.
///
/// # Safety
/// As [`cactus_complete`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_render_prompt(
    model: *mut c_void,
    messages_json: *const c_char,
    options_json: *const c_char,
    tools_json: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    let out = Buffer { start: buffer, size };
    guarded(
        |_| FAILED,
        || {
            // SAFETY: the caller's promises.
            unsafe {
                let prompt = handle(model)?.render(&asked(messages_json, options_json, tools_json)?)?;
                Ok(out.write(&prompt).unwrap_or(TOO_SMALL))
            }
        },
    )
}

/// Token ids of a text. 0, -1, or -2 when there is no room; `count` is set to their number in both good cases. A null
/// buffer only asks for it.
///
/// # Safety
/// `model` comes from [`cactus_init`], `out` is null or has room for `capacity` ids, `count` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_tokenize(
    model: *mut c_void,
    text: *const c_char,
    out: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> c_int {
    guarded(
        |_| FAILED,
        || {
            // SAFETY: the caller's promises; ids are written only where there is room.
            unsafe {
                let ids = handle(model)?.tokenize(needed(text, "text")?)?;
                if !count.is_null() {
                    *count = ids.len();
                }
                if out.is_null() {
                    return Ok(0);
                }
                if ids.len() > capacity {
                    return Ok(TOO_SMALL);
                }
                std::ptr::copy_nonoverlapping(ids.as_ptr(), out, ids.len());
                Ok(0)
            }
        },
    )
}

/// Log-probability of the tokens `start..end`, seen from at most `context` tokens before them, as
/// `{"success", "logprob", "tokens"}`. Bytes written, or -1.
///
/// # Safety
/// `model` comes from [`cactus_init`], `tokens` is valid for `count` ids, `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_score_window(
    model: *mut c_void,
    tokens: *const u32,
    count: usize,
    start: usize,
    end: usize,
    context: usize,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    let out = Buffer { start: buffer, size };
    // SAFETY: the caller's promises.
    unsafe {
        out.respond(|| {
            if tokens.is_null() {
                return Err(Error::usage("tokens is null"));
            }
            handle(model)?.score_window(std::slice::from_raw_parts(tokens, count), start, end, context)
        })
    }
}

/// The vector of a text. Floats written, -1, or -2 when `bytes` are too few; `dim` is set to their number in both good cases. A
/// null buffer only asks for it. The length is 1 with `normalize`.
///
/// # Safety
/// `model` comes from [`cactus_init`], `out` is null or has room for `bytes`, `dim` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_embed(
    model: *mut c_void,
    text: *const c_char,
    out: *mut f32,
    bytes: usize,
    dim: *mut usize,
    normalize: bool,
) -> c_int {
    guarded(
        |_| FAILED,
        || {
            // SAFETY: the caller's promises; values are written only where there is room.
            unsafe {
                let vector = handle(model)?.embed(needed(text, "text")?, normalize)?;
                if !dim.is_null() {
                    *dim = vector.len();
                }
                if out.is_null() {
                    return Ok(0);
                }
                if size_of_val(vector.as_slice()) > bytes {
                    return Ok(TOO_SMALL);
                }
                std::ptr::copy_nonoverlapping(vector.as_ptr(), out, vector.len());
                Ok(c_int::try_from(vector.len()).unwrap_or(c_int::MAX))
            }
        },
    )
}

/// The passages of the corpus that belong to a question, `top_k` at most (0: five), as
/// `{"chunks": [{"score", "source", "content"}]}`; without a corpus there are none. Bytes written, or -1.
///
/// # Safety
/// As [`cactus_complete`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_rag_query(
    model: *mut c_void,
    query: *const c_char,
    buffer: *mut c_char,
    size: usize,
    top_k: usize,
) -> c_int {
    let out = Buffer { start: buffer, size };
    // SAFETY: the caller's promises.
    unsafe { out.respond(|| handle(model)?.passages(needed(query, "query")?, top_k)) }
}

/// The last error of this thread; never null, and valid until its next call.
#[unsafe(no_mangle)]
pub extern "C" fn cactus_get_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

/// Messages below `level` are not handed on: 0 debug, 1 info, 2 warning (default), 3 error, 4 none.
#[unsafe(no_mangle)]
pub extern "C" fn cactus_log_set_level(level: c_int) {
    LEVEL.store(level, Ordering::Relaxed);
}

/// Who gets messages; null: nobody.
#[unsafe(no_mangle)]
pub extern "C" fn cactus_log_set_callback(callback: LogCallback, user: *mut c_void) {
    *LOG.lock().unwrap_or_else(|e| e.into_inner()) = Log { callback, user };
}
