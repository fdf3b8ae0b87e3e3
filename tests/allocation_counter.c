/* Preloaded: the level and the peak of what torch's CPU allocator holds. It asks for blocks aligned to 64 bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1 << 20)

static uintptr_t keys[SLOTS]; /* open addressing; 0 is empty, 1 is given back */
static size_t sizes[SLOTS];
static long level, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t slot_of(uintptr_t key) { return ((key >> 6) * 11400714819323198485ull) % SLOTS; }

int posix_memalign(void **block, size_t alignment, size_t size)
{
    static int (*next)(void **, size_t, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "posix_memalign");
    int error = next(block, alignment, size);
    if (error || alignment != 64 || !*block) return error;
    pthread_mutex_lock(&lock);
    size_t slot = slot_of((uintptr_t)*block);
    while (keys[slot] > 1) slot = (slot + 1) % SLOTS;
    keys[slot] = (uintptr_t)*block;
    sizes[slot] = size;
    level += size;
    if (level > peak) peak = level;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *block)
{
    static void (*next)(void *);
    if (!next) next = dlsym(RTLD_NEXT, "free");
    if (block && !((uintptr_t)block & 63)) {
        pthread_mutex_lock(&lock);
        size_t slot = slot_of((uintptr_t)block);
        for (int tried = 0; keys[slot] && tried < SLOTS; tried++, slot = (slot + 1) % SLOTS)
            if (keys[slot] == (uintptr_t)block) {
                level -= sizes[slot];
                keys[slot] = 1;
                break;
            }
        pthread_mutex_unlock(&lock);
    }
    next(block);
}

long allocation_level(void) { return level; }
long allocation_peak(void) { return peak; }
void allocation_restart(void) { peak = level; }
