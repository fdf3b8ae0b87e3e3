/* Counts what torch's CPU allocator has handed out: preloaded, it watches posix_memalign, realloc and free.

   1. A block counts if libc10 asked for it (the caller's address lies in that library): what oneDNN, MKL, NumPy or
      Python take is not a tensor. Bytes are those asked for, so the resolution is one byte.
   2. Live blocks are in an open-addressing table with linear probing. A deletion moves later entries of the cluster
      back, so there are no tombstones and a search ends at the first empty slot. When the table is three quarters
      full, `counter_lost` counts what did not fit, and nothing that was counted is valid any more.
   3. One mutex guards all; the highest sum since `counter_reset` is the peak. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS ((size_t)1 << 20)
static uintptr_t keys[SLOTS];
static size_t sizes[SLOTS];
static size_t used;
static long current, peak, lost, allocations;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t from, to; /* of libc10's code */
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);
static void *(*real_realloc)(void *, size_t);

static void resolve(void) {
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (!real_realloc) real_realloc = dlsym(RTLD_NEXT, "realloc");
    if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
}

static int find_library(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    (void)data;
    const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    if (!name || strcmp(name, "/libc10.so") != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X)) {
            from = info->dlpi_addr + part->p_vaddr;
            to = from + part->p_memsz;
        }
    }
    return 1;
}

/* Called once libc10 is loaded; until then nothing counts. */
int counter_start(void) {
    dl_iterate_phdr(find_library, NULL);
    return from != 0;
}

static size_t home(uintptr_t p) { return (size_t)((p >> 6) * 11400714819323198485ull >> 44); }

static void insert(uintptr_t p, size_t bytes) {
    if (used >= SLOTS / 4 * 3) {
        lost++;
        return;
    }
    size_t i = home(p);
    while (keys[i]) i = (i + 1) & (SLOTS - 1);
    keys[i] = p;
    sizes[i] = bytes;
    used++;
    allocations++;
    current += (long)bytes;
    if (current > peak) peak = current;
}

static int take(uintptr_t p, size_t *bytes) {
    size_t i = home(p);
    while (keys[i] != p) {
        if (!keys[i]) return 0;
        i = (i + 1) & (SLOTS - 1);
    }
    *bytes = sizes[i];
    current -= (long)sizes[i];
    used--;
    for (size_t j = i;;) { /* move back what the hole would hide */
        j = (j + 1) & (SLOTS - 1);
        if (!keys[j]) break;
        size_t k = home(keys[j]);
        if (((j - k) & (SLOTS - 1)) >= ((j - i) & (SLOTS - 1))) {
            keys[i] = keys[j];
            sizes[i] = sizes[j];
            i = j;
        }
    }
    keys[i] = 0;
    return 1;
}

int posix_memalign(void **p, size_t alignment, size_t bytes) {
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    resolve();
    int error = real_memalign(p, alignment, bytes);
    if (!error && *p && caller >= from && caller < to) {
        pthread_mutex_lock(&guard);
        insert((uintptr_t)*p, bytes);
        pthread_mutex_unlock(&guard);
    }
    return error;
}

void free(void *p) {
    if (!real_free) resolve();
    if (p && used && !((uintptr_t)p & 63)) { /* c10's blocks are aligned to 64 bytes */
        size_t bytes;
        pthread_mutex_lock(&guard);
        take((uintptr_t)p, &bytes);
        pthread_mutex_unlock(&guard);
    }
    real_free(p);
}

void *realloc(void *p, size_t bytes) {
    if (!real_realloc) resolve();
    size_t before = 0;
    int ours = 0;
    if (p && used && !((uintptr_t)p & 63)) { /* out of the table before another thread may be given the address */
        pthread_mutex_lock(&guard);
        ours = take((uintptr_t)p, &before);
        pthread_mutex_unlock(&guard);
    }
    void *moved = real_realloc(p, bytes);
    if (ours && (moved || bytes)) {
        pthread_mutex_lock(&guard);
        insert((uintptr_t)(moved ? moved : p), moved ? bytes : before);
        pthread_mutex_unlock(&guard);
    }
    return moved;
}

static void hold(void) { pthread_mutex_lock(&guard); } /* a fork finds the table whole */
static void let_go(void) { pthread_mutex_unlock(&guard); }
__attribute__((constructor)) static void at_start(void) {
    resolve();
    pthread_atfork(hold, let_go, let_go);
}

long counter_current(void) { return current; }
long counter_peak(void) { return peak; }
long counter_lost(void) { return lost; }
long counter_allocations(void) { return allocations; }
void counter_reset(void) {
    pthread_mutex_lock(&guard);
    peak = current;
    pthread_mutex_unlock(&guard);
}
