//! The C API of vector indices, see [`crate::engine::retrieve::vector_index`]. `docs/c-api.md` explains it.

use super::super::fields::{FieldError, Fields};
use super::super::retrieve::vector_index::{Document, VectorIndex};
use super::{FAILED, guarded, needed, text};
use crate::error::{Error, Result};
use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// Documents that a query gives where nothing is said.
const TOP: u64 = 10;

/// # Safety
/// `index` is null or comes from [`cactus_index_init`] and was not destroyed.
unsafe fn open<'a>(index: *mut c_void) -> Result<MutexGuard<'a, VectorIndex>> {
    // SAFETY: the caller's promise.
    let index = unsafe { index.cast::<Mutex<VectorIndex>>().as_ref() }.ok_or_else(|| Error::usage("the index is null"))?;
    Ok(index.lock().unwrap_or_else(|e| e.into_inner()))
}

/// # Safety
/// `start` is null or valid for `count` values.
unsafe fn list<'a, T>(start: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    match (start.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::usage(format!("{name} is null"))),
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(start, count) }),
    }
}

/// 0 when `work` succeeds, else -1.
fn done(work: impl FnOnce() -> Result<()>) -> c_int {
    guarded(|_| FAILED, || work().map(|()| 0))
}

/// Opens the index in the folder `dir` for vectors of `dim` values, or makes one. One at a time can have a folder open. Null
/// after an error.
///
/// # Safety
/// `dir` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_init(dir: *const c_char, dim: usize) -> *mut c_void {
    guarded(
        |_| std::ptr::null_mut(),
        || {
            // SAFETY: the caller's promise.
            let dir = unsafe { needed(dir, "dir") }?;
            Ok(Box::into_raw(Box::new(Mutex::new(VectorIndex::open(Path::new(dir), dim)?))).cast())
        },
    )
}

/// Adds `count` documents with their vectors of `dim` values, all or none. `metadatas` and its entries may be null. 0 or -1.
///
/// # Safety
/// `index` comes from [`cactus_index_init`]; the lists have `count` entries: ids, C strings, and pointers to `dim` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_add(
    index: *mut c_void,
    ids: *const c_int,
    documents: *const *const c_char,
    metadatas: *const *const c_char,
    embeddings: *const *const f32,
    count: usize,
    dim: usize,
) -> c_int {
    done(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let mut index = open(index)?;
            let (ids, documents) = (list(ids, count, "ids")?, list(documents, count, "documents")?);
            let embeddings = list(embeddings, count, "embeddings")?;
            let metadatas = if metadatas.is_null() { &[] } else { list(metadatas, count, "metadatas")? };
            let document = |i: usize| -> Result<Document> {
                Ok(Document {
                    id: ids[i],
                    content: needed(documents[i], "a document")?,
                    metadata: metadatas.get(i).map(|text_| text(*text_, "a metadata")).transpose()?.flatten().unwrap_or(""),
                    vector: list(embeddings[i], dim, "an embedding")?,
                })
            };
            index.add(&(0..count).map(document).collect::<Result<Vec<_>>>()?)
        }
    })
}

/// Deletes documents, all or none. 0 or -1.
///
/// # Safety
/// `index` comes from [`cactus_index_init`], `ids` has `count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_delete(index: *mut c_void, ids: *const c_int, count: usize) -> c_int {
    // SAFETY: the caller's promises.
    done(|| unsafe { open(index)?.delete(list(ids, count, "ids")?) })
}

/// Reads documents. Every list of buffers may be null; the sizes are capacities before, and what each document takes after: bytes
/// with the zero byte, and floats. 0 or -1, also when something does not fit.
///
/// # Safety
/// `index` comes from [`cactus_index_init`]; every list that is not null has `count` entries, and every buffer room for its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_get(
    index: *mut c_void,
    ids: *const c_int,
    count: usize,
    document_buffers: *const *mut c_char,
    document_sizes: *mut usize,
    metadata_buffers: *const *mut c_char,
    metadata_sizes: *mut usize,
    embedding_buffers: *const *mut f32,
    embedding_sizes: *mut usize,
) -> c_int {
    done(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let mut index = open(index)?;
            for (i, id) in list(ids, count, "ids")?.iter().enumerate() {
                let stored = index.get(*id)?;
                let content = [stored.content.as_bytes(), b"\0"].concat();
                let metadata = [stored.metadata.as_bytes(), b"\0"].concat();
                put(content.as_slice(), document_buffers.cast(), document_sizes, i)?;
                put(metadata.as_slice(), metadata_buffers.cast(), metadata_sizes, i)?;
                put(stored.vector.as_slice(), embedding_buffers, embedding_sizes, i)?;
            }
            Ok(())
        }
    })
}

/// Copies `values` into buffer `i` and sets its size.
///
/// # Safety
/// `buffers` is null, or it and `sizes` have more than `i` entries and buffer `i` has room for size `i`.
unsafe fn put<T: Copy>(values: &[T], buffers: *const *mut T, sizes: *mut usize, i: usize) -> Result<()> {
    if buffers.is_null() {
        return Ok(());
    }
    if sizes.is_null() {
        return Err(Error::usage("the sizes of buffers are null"));
    }
    // SAFETY: the caller's promise; values are written only where there is room.
    unsafe {
        let (buffer, size) = (*buffers.add(i), sizes.add(i));
        let room = std::mem::replace(&mut *size, values.len());
        if buffer.is_null() || room < values.len() {
            return Err(Error::usage(format!("buffer {i} is too small: {room}, {} are needed", values.len())));
        }
        std::ptr::copy_nonoverlapping(values.as_ptr(), buffer, values.len());
    }
    Ok(())
}

/// The documents nearest to each of `count` vectors of `dim` values, the nearest first. Options: `top_k` (10) and
/// `score_threshold` (-1), a cosine. The sizes are capacities before, and numbers of results after; no more are given than fit.
/// 0 or -1.
///
/// # Safety
/// `index` comes from [`cactus_index_init`]; all lists have `count` entries, vectors `dim` values, buffers room for their sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_query(
    index: *mut c_void,
    embeddings: *const *const f32,
    count: usize,
    dim: usize,
    options_json: *const c_char,
    id_buffers: *const *mut c_int,
    id_sizes: *mut usize,
    score_buffers: *const *mut f32,
    score_sizes: *mut usize,
) -> c_int {
    done(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let index = open(index)?;
            let options = match text(options_json, "options_json")? {
                Some(json) if !json.trim().is_empty() => Fields::parse(json.as_bytes()).map_err(FieldError::into_error)?,
                _ => Fields::default(),
            };
            let top = options.whole("top_k", 0..=u64::from(u32::MAX)).map_err(FieldError::into_error)?.unwrap_or(TOP) as usize;
            let least = options.number("score_threshold", -1e9..=1e9).map_err(FieldError::into_error)?.unwrap_or(-1.0);
            if id_sizes.is_null() || score_sizes.is_null() {
                return Err(Error::usage("the sizes of buffers are null"));
            }
            for (i, vector) in list(embeddings, count, "embeddings")?.iter().enumerate() {
                let room = (*id_sizes.add(i)).min(*score_sizes.add(i)).min(top);
                let found = index.query(list(*vector, dim, "an embedding")?, room, least as f32)?;
                let (ids, scores): (Vec<c_int>, Vec<f32>) = found.into_iter().unzip();
                put(&ids, id_buffers, id_sizes, i)?;
                put(&scores, score_buffers, score_sizes, i)?;
            }
            Ok(())
        }
    })
}

/// Writes the index anew without what was deleted. 0 or -1.
///
/// # Safety
/// `index` comes from [`cactus_index_init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_compact(index: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    done(|| unsafe { open(index)?.compact() })
}

/// Closes an index; null is allowed. Nothing else may be running with it.
///
/// # Safety
/// `index` is null or comes from [`cactus_index_init`], and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cactus_index_destroy(index: *mut c_void) {
    if index.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    done(|| {
        drop(unsafe { Box::from_raw(index.cast::<Mutex<VectorIndex>>()) });
        Ok(())
    });
}
