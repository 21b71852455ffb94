-- One exchange of one replica with the leases of one partition: it is alive, and it does these things.
--
-- KEYS  leases:   pod -> "epoch holder asker", "-" for no asker; a pod that is not there is free
--       replicas: replica -> "deadline ttl", in milliseconds of this server's clock; "#change" -> the last change
-- ARGV  replica, its ttl in milliseconds (0: it leaves), the last change that it knows, then pairs of verb and pod:
--       claim (if it is free), release, ask (whoever holds it will hand it over), unask
-- Returns the last change, {replica, milliseconds left, ...} and {pod, lease, ...}; no leases where it knows them.
--
-- Every change has a number, and an epoch is the number of the change that gave the lease. Numbers begin at the time
-- of day, so they rise even where the server lost its data. A lease whose holder is past its deadline passes on here,
-- whoever makes the exchange, to the living replica that asked for it, or is free. A deadline further away than its ttl
-- comes of a clock that was set back: it is brought back within the ttl, or a dead replica would hold for as long.
local leases, replicas = KEYS[1], KEYS[2]
local me, ttl_ms, known = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('HGET', replicas, '#change') or '0')
local alive = {}

local function next_change()
  last = math.max(last + 1, now)
  redis.call('HSET', replicas, '#change', string.format('%.0f', last))
  return string.format('%.0f', last)
end

local function lease_of(pod)
  local lease = redis.call('HGET', leases, pod)
  if not lease then return nil end
  return string.match(lease, '^(%d+) (%S+) (%S+)$')
end

local function give(pod, replica)
  redis.call('HSET', leases, pod, next_change() .. ' ' .. replica .. ' -')
end

local function set_asker(pod, epoch, holder, asker)
  redis.call('HSET', leases, pod, epoch .. ' ' .. holder .. ' ' .. asker)
  next_change()
end

local function free(pod, asker)
  if alive[asker] then return give(pod, asker) end
  redis.call('HDEL', leases, pod)
  next_change()
end

local function say_alive(replica, deadline, ttl)
  alive[replica] = deadline
  redis.call('HSET', replicas, replica, string.format('%.0f %.0f', deadline, ttl))
end

local died = false
local all = redis.call('HGETALL', replicas)
for i = 1, #all, 2 do
  local deadline, ttl = string.match(all[i + 1], '^(%d+) (%d+)$')
  if deadline then
    deadline, ttl = tonumber(deadline), tonumber(ttl)
    if deadline <= now or (all[i] == me and ttl_ms == 0) then
      redis.call('HDEL', replicas, all[i])
      died = true
    elseif deadline > now + ttl then
      say_alive(all[i], now + ttl, ttl)
    else
      alive[all[i]] = deadline
    end
  end
end

if died then
  next_change()
  local held = redis.call('HGETALL', leases)
  for i = 1, #held, 2 do
    local epoch, holder, asker = string.match(held[i + 1], '^(%d+) (%S+) (%S+)$')
    if not alive[holder] then
      free(held[i], asker)
    elseif asker ~= '-' and not alive[asker] then
      set_asker(held[i], epoch, holder, '-')
    end
  end
end

if ttl_ms > 0 then
  if not alive[me] then next_change() end
  say_alive(me, now + ttl_ms, ttl_ms)
  for i = 4, #ARGV, 2 do
    local verb, pod = ARGV[i], ARGV[i + 1]
    local epoch, holder, asker = lease_of(pod)
    if verb == 'claim' and not epoch then
      give(pod, me)
    elseif verb == 'release' and holder == me then
      free(pod, asker)
    elseif verb == 'ask' and epoch and holder ~= me and asker == '-' then
      set_asker(pod, epoch, holder, me)
    elseif verb == 'unask' and asker == me then
      set_asker(pod, epoch, holder, '-')
    end
  end
end

local living = {}
for replica, deadline in pairs(alive) do
  living[#living + 1] = replica
  living[#living + 1] = deadline - now
end
local change = string.format('%.0f', last)
return {change, living, change ~= known and redis.call('HGETALL', leases) or false}
